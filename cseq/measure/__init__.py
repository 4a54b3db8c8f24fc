"""Measurements: why a loop waits, and what a trace shows.

``meters``  the figures that the trainer and each runner measure
``stats``   counts and times of a run, or of some time in a run
``advice``  why a loop waits, and what helps: one table of rules
``_trace``  the tickets that a trace records
``lanes``   the runners of a pool, as a trace shows them
"""

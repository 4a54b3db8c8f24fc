"""What is measured: why a loop waits, and what a trace shows.

``meters``  what each party of a ring has measured
``stats``   counts and times of a run, or of a part of it
``advice``  why a loop waits, and what helps: one table of rules
``_trace``  the tickets that a trace records
``lanes``   the runners of a pool, as a trace shows them
"""

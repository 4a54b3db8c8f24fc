"""Measurements of loops: meters, statistics, advice and traces.

``meters``  the raw figures recorded by the trainer and each runner
``stats``   counts and times of a run, or of an interval within a run
``advice``  why a loop waits and what helps, as one table of rules
``_trace``  the tickets recorded by a trace
``lanes``   the runners of a pool, as shown in a trace
"""

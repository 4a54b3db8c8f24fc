"""Measurements of loops: meters, statistics, advice and traces.

``meters``  the raw figures recorded by the trainer and each runner
``stats``   counts and times for a run or part of a run
``advice``  why a loop waits and what helps, as one table of rules
``_trace``  the tickets recorded by a trace
``lanes``   a pool's runners, as shown in a trace
"""

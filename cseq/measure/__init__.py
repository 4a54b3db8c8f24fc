"""Measurements of training loops: meters, statistics, advice and traces.

``meters``  the raw figures that the trainer and each runner record
``stats``   statistics on a run, or on part of a run
``advice``  finds out why a loop waits and what would help
``_trace``  the tickets in a trace
``lanes``   the runners of a pool in a trace
"""

"""The engine of the benchmarks: processes, rounds, statistics, reports. It knows no loader.

::

    case.py     what a case is: contenders, unit, goals
    runner.py   contenders as processes, in turn; figures, CPU time, memory, descriptors
    child.py    the process of one contender
    usage.py    what a process and all its descendants use
    report.py   the table, in Markdown and JSON
    chart.py    the picture, of parts in cseq/report/figures.py
"""

"""Laboratory: slow networks on one machine, trainings on them, comparisons and their report.

The lab uses the library, which never imports it; the command line names the lab's commands as text.
"""

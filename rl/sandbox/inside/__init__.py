"""Run programs in isolation, in these processes: zygote, a run's monitor, init, candidate, tester.

The modules import only the standard library and each other.
"""

"""The processes that run in isolation: the zygote, a run's monitor, init, candidate and tester.

They import only the standard library and each other.
"""

"""Environments that other people wrote, as environments here. Each needs its package, which nothing
else does.
"""

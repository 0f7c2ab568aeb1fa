"""Adapt environments of other libraries. Each adapter needs the package of its library, which no
other part of the project needs.
"""

"""The rules of the built-in games, and players that follow a rule: plain Python, no tokens and no
models.
"""

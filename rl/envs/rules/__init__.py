"""Implement the rules of the built-in games, and rule-based players, without tokens or models."""

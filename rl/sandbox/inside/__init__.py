"""What runs behind the walls: the zygote, a run's monitor, init, candidate and tester. Standard
library alone, nothing of the rest.
"""

"""An environment with a tool: the price of an item stands in a list that only the tool can read."""

from dataclasses import dataclass

from rl.envs import Environment, TurnResult


@dataclass
class PriceList(Environment):
    """Ask for the price of an item. The right price earns 1."""

    items: int = 90
    """Number of items."""

    def __post_init__(self):
        self.tools = (self.price,)

    def start(self):
        self.item = self.rng.randrange(10, 10 + self.items)
        self.cost = self.rng.randrange(10, 100)
        return f"price of {self.item}?"

    def price(self, item: int) -> str:
        """Returns the price of an item.

        Args:
            item: the number of the item
        """
        return str(self.cost) if item == self.item else "unknown"

    def step(self, answer):
        correct = float(answer["content"].strip() == str(self.cost))
        metrics = {"correct": correct, "used_tool": float(bool(self.calls))}
        return TurnResult(reward=correct, done=True, metrics=metrics)

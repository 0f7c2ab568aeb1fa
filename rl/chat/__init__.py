"""Hold conversations with models in a terminal: commands, and answers shown side by side."""

from rl.chat.answer_display import describe_sample
from rl.chat.chat_console import ChatConsole
from rl.chat.chat_session import ChatSession

__all__ = ["ChatConsole", "ChatSession", "describe_sample"]

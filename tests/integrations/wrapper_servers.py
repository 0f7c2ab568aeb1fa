"""Check environments and tools that are servers (OpenEnv, MCP) for test_wrapped_packages.py."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from wrapper_scripted import Found, check_episode_cost, count_cases, play_environment

from rl.envs import resolve_environment

OPENENV_SERVER = """
import sys, uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

class Say(Action):
    message: str

class Heard(Observation):
    text: str = ""
    left: int = 0

class Count(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    def __init__(self):
        super().__init__()
        self.left = 0
    def reset(self, seed=None, episode_id=None, **more):
        self.left = 3
        return Heard(text=f"Say {self.left}", left=self.left)
    def step(self, action, timeout_s=None, **more):
        right = action.message.strip() == str(self.left)
        self.left -= 1
        return Heard(text=f"Say {self.left}", left=self.left, reward=1.0 if right else 0.0, done=self.left == 0)
    @property
    def state(self):
        return State(step_count=3 - self.left)

uvicorn.run(create_fastapi_app(Count, Say, Heard, max_concurrent_envs=16), port=int(sys.argv[1]), log_level="error")
"""

MCP_SERVER = '''
import sys, time
from mcp.server.mcpserver import MCPServer
server = MCPServer("numbers")

@server.tool()
def multiply(a: int, b: int) -> int:
    """Multiplies two whole numbers."""
    return a * b

@server.tool()
def fail(why: str) -> str:
    """Fails."""
    raise ValueError(why)

@server.tool()
def hang() -> str:
    """Never answers."""
    time.sleep(1000)

server.run()
'''


def _script(text: str) -> str:
    path = Path(tempfile.mkdtemp()) / "server.py"
    path.write_text(text)
    return str(path)


def check_openenv_episodes() -> Found:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen([sys.executable, _script(OPENENV_SERVER), str(port)])
    try:
        for _ in range(240):
            time.sleep(0.5)
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
        spec = resolve_environment("openenv", url=f"http://127.0.0.1:{port}", show="text")
        result = play_environment(
            spec, lambda prompt: re.findall(r"Say (\d)", prompt)[-1], rows=[{}, {}], group=2
        )
        wrong = play_environment(spec, lambda prompt: "9")
        turns = result.groups[0].trajectories_G[0].transitions if result.groups else []
        asjson = resolve_environment("openenv", url=f"http://127.0.0.1:{port}", action="json")
        strange = play_environment(
            asjson, lambda prompt: "no json" if "Error" not in prompt else '{"message": "1"}'
        )
        metrics = [t.metrics for t in strange.groups[0].trajectories_G[0].transitions]
        return count_cases([
            ("episodes side by side",
             lambda: [g.get_total_rewards() for g in result.groups] == [[3.0, 3.0]] * 2),
            ("each turn has its reward", lambda: [t.reward for t in turns] == [1.0] * 3),
            ("wrong answers earn nothing", lambda: wrong.groups[0].get_total_rewards() == [0.0]),
            ("an answer that is no action is told and counted",
             lambda: [m.get("malformed_action") for m in metrics] == [1.0, 0.0, 0.0, 0.0]),
            ("a server that is not there costs its episode",
             lambda: check_episode_cost("openenv", url="http://127.0.0.1:9", wait_seconds=5.0)),
        ])  # fmt: skip
    finally:
        server.terminate()


def check_mcp_episodes() -> Found:
    command = f"{sys.executable} {_script(MCP_SERVER)}"
    from rl.envs.tools import run_calls
    from rl.integrations import McpServer

    server = McpServer(command, seconds=60.0)
    try:
        tools = {item.name: item for item in server.tools()}

        def called(name: str, **arguments: Any) -> Any:
            (call,) = run_calls(
                {"tool_calls": [{"function": {"name": name, "arguments": arguments}}]}, tools
            )
            return call

        object.__setattr__(tools["hang"], "seconds", 2.0)
        hung = called("hang")
        cases = [
            ("its tools are listed", lambda: sorted(tools) == ["fail", "hang", "multiply"]),
            ("their descriptions and parameters",
             lambda: all(w in str(tools["multiply"].schema) for w in ("Multiplies", "integer"))),
            ("a call is answered", lambda: called("multiply", a=6, b=7).answer == "42"),
            ("one that fails says so",
             lambda: "fail" in (called("fail", why="no luck").error or "")),
            ("arguments that it does not take",
             lambda: called("multiply", a="six").error is not None),
            ("one that hangs is given up", lambda: "longer than 2 s" in (hung.error or "")),
        ]  # fmt: skip
        result = count_cases(cases)
    finally:
        server.close()
    spec = resolve_environment("mcp", server=command, only="multiply", call_seconds=60.0)
    made = spec.make()
    made.row, made.calls = {"messages": [{"role": "user", "content": "6*7?"}], "answer": "42"}, []
    made.start()
    whole = count_cases([
        ("an environment offers what it is asked for",
         lambda: [item.name for item in made.tools] == ["multiply"]),
        ("and pays by a reward",
         lambda: made.step({"role": "assistant", "content": "42"}).reward == 1.0),
        ("a server that is not there costs its episode",
         lambda: check_episode_cost("mcp", server="false", call_seconds=20.0)),
    ])  # fmt: skip
    made.close()
    return result[0] + whole[0], result[1] + whole[1], result[2] + whole[2]

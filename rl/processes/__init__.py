"""Run functions and programs in processes that can be killed and leave none behind.

A `SupervisedProcess` runs under a reaper, which ends every process that it started, also if this
process is killed. A `WorkerProcess` exchanges framed messages with it within time limits. A
`ForkedCall` calls a function in a fork. A `RunLock` holds a folder for one process.
"""

from rl.processes.forked_call import ForkedCall
from rl.processes.message_frames import (
    FrameReader,
    InvalidReply,
    encode_frame,
    open_channel,
    read_message,
)
from rl.processes.reaper import (
    MARK_VARIABLE,
    detach_from,
    find_descendants,
    kill_process,
    kill_tree,
    set_parent_death_signal,
)
from rl.processes.run_lock import LOCK, RunLock
from rl.processes.supervised_process import (
    MessageChannel,
    SupervisedProcess,
    WorkerDiedError,
    WorkerProcess,
    get_environment_without_launch,
)

__all__ = [
    "LOCK",
    "MARK_VARIABLE",
    "ForkedCall",
    "FrameReader",
    "InvalidReply",
    "MessageChannel",
    "RunLock",
    "SupervisedProcess",
    "WorkerDiedError",
    "WorkerProcess",
    "detach_from",
    "encode_frame",
    "find_descendants",
    "get_environment_without_launch",
    "kill_process",
    "kill_tree",
    "open_channel",
    "read_message",
    "set_parent_death_signal",
]

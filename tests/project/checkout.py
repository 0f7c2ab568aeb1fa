"""Copy the checkout, for tests that change it or build from it."""

import subprocess
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]


def copy_checkout(folder: Path, leave_out: tuple[str, ...] = ()) -> Path:
    """Copy the files that git lists to `folder`, without those below the folders `leave_out`."""
    command = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
    names = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (REPO / name).is_file() and name.partition("/")[0] not in leave_out:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes((REPO / name).read_bytes())
    return folder

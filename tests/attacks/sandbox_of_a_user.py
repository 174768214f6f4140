"""A program of `test_sandbox`: the walls for a user who is not root, by the system's Python."""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, ".")

from marin_rl.isolated.sandbox import Sandbox, SandboxLimits, check_sandbox

check_sandbox("bubblewrap")
box = Sandbox(SandboxLimits(wall_s=120, cpu_s=100, processes=20))
program = """
import ctypes, errno, os, time
libc = ctypes.CDLL(None, use_errno=True)
def error(result):
    return errno.errorcode[ctypes.get_errno()] if result == -1 else "allowed"
print(os.getuid(), error(libc.unshare(0x10000000)), error(libc.ptrace(16, 1, 0, 0)), flush=True)
children = 0
try:
    while True:
        if os.fork() == 0:
            time.sleep(1000)
        children += 1
except OSError as problem:
    print(children < 20, errno.errorcode[problem.errno])
"""
result = box.run([box.python, "-I", "-S", "-c", program])
sys.stdout.write(result.stdout.decode())
hidden = {
    "unlinked": "os.unlink('x')",
    "in a closed folder": "os.mkdir('d'); os.rename('x', 'd/x'); os.chmod('d', 0)",
}
box = Sandbox(SandboxLimits(wall_s=120, disk_bytes=128 << 20, workspace_bytes=32 << 20))
for hide in hidden.values():
    program = f"import os, time; f = os.open('x', os.O_RDWR | os.O_CREAT); {hide}\n"
    program += "for _ in range(100): os.write(f, bytes(1 << 20))\ntime.sleep(1000)"
    with tempfile.TemporaryDirectory(dir="/var/tmp", ignore_cleanup_errors=True) as folder:
        ended = box.run([box.python, "-I", "-S", "-c", program], workspace=Path(folder))
        for place in Path(folder).glob("d"):
            place.chmod(0o700)
    print(ended.limit)
sys.stderr.write(result.stderr.decode())

"""A program of `test_sandbox`: the walls for a user who is not root, by the system's Python."""

import sys

sys.path.insert(0, ".")

from marin_rl.isolated.sandbox import Sandbox, SandboxLimits
from marin_rl.isolated.sandbox_check import check_sandbox

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
sys.stderr.write(result.stderr.decode())

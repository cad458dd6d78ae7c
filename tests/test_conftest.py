"""Children of tests receive signals, even if the process that started the tests ignores them (nohup, a background job)."""

import subprocess
import sys

SHOW = """
import signal
print([number.name for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM)
       if signal.getsignal(number) == signal.SIG_IGN])
"""
IGNORE_AND_RUN = """
import os, signal, sys
for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


def test_children_receive_signals():
    ignored = subprocess.run([sys.executable, "-c", SHOW], capture_output=True, text=True, check=True).stdout
    assert ignored == "[]\n"


def test_children_under_nohup_receive_signals():
    inner = ["-m", "pytest", "-q", "-p", "no:cacheprovider", f"{__file__}::{test_children_receive_signals.__name__}"]
    done = subprocess.run([sys.executable, "-c", IGNORE_AND_RUN, *inner], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout

"""One thread for torch: the matrices of the tests are tiny, and waiting threads spin, ten times slower if busy.

Set before anything imports torch; subprocesses inherit it.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

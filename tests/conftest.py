"""Before torch is imported: test workers share the cores, so each computes with one thread and does not spin."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

"""cseq on a CUDA device, compared with bare copies, a batch that is already there, and torch.

::

    device.py   the device, or the CPU as a substitute
    cases.py    what is measured
    run.py      tests/gpu, then the cases; one results file
"""

# The environment variable with the device: 'cuda', or 'cpu' as a substitute.
DEVICE = "CSEQ_GPU_DEVICE"

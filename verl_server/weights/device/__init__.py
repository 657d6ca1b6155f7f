"""What a weight update does with accelerators: the order of streams, copies, and pinned memory.

Buckets in GPU memory are in `double_buffer/device_memory.py`. Everything else that depends on an accelerator is here.
It does the plain thing, or nothing, where tensors are on the CPU. It has not been run on a GPU yet.
"""

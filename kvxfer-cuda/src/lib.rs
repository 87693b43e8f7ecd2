//! GPU memory: the CUDA driver behind one seam, the memory domain of its devices, and ordering against kernels.

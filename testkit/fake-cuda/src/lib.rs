//! A CUDA driver of our own for tests.

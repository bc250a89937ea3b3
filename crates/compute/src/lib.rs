//! The operations that a transformer is made of, behind one backend trait, with CPU kernels.

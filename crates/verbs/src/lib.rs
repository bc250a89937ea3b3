//! RDMA verbs by dlopen: safe devices, memory regions, queue pairs and completions.

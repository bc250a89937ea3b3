//! Groups of ranks and the collectives among them, over shared memory, TCP and RDMA.

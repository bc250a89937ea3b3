//! Starts, supervises and describes the ranks of a group: local processes, environments, host files.

//! Which pairs of ranks talk over what.

use crate::config::RdmaConfig;
use crate::rendezvous::Endpoint;
use crate::{Config, InitError, TransportChoice};

/// The table of all ranks as this rank sees it.
pub(super) struct Topology<'a> {
    pub config: &'a Config,
    /// The endpoints of all ranks, in rank order.
    pub table: &'a [Endpoint],
}

impl<'a> Topology<'a> {
    /// # Errors
    /// When only shared memory is allowed and a rank is on another host.
    pub fn new(config: &'a Config, table: &'a [Endpoint]) -> Result<Self, InitError> {
        let topology = Self { config, table };
        if config.transport == TransportChoice::Shm
            && let Some(peer) = (0..table.len()).find(|peer| !topology.shares_memory(*peer))
        {
            return Err(InitError::NotLocal { rank: peer });
        }
        Ok(topology)
    }

    /// The name of this group.
    pub fn session(&self) -> &'a str {
        &self.table[0].session
    }

    /// True when `peer` is on this rank's host.
    pub fn same_host(&self, peer: usize) -> bool {
        self.table[peer].host == self.table[self.config.rank].host
    }

    /// This rank's devices towards `peer`, where RDMA is to be used.
    pub fn cables(&self, peer: usize) -> Option<(&'a RdmaConfig, &'a [String])> {
        let wanted = match self.config.transport {
            TransportChoice::Shm | TransportChoice::Tcp => false,
            TransportChoice::Auto => !self.same_host(peer),
            TransportChoice::Rdma => true,
        };
        let rdma = self.config.rdma.as_ref().filter(|_| wanted)?;
        Some((rdma, rdma.devices.get(&peer)?.as_slice()))
    }

    /// True when the link to `peer` is shared memory.
    pub fn shares_memory(&self, peer: usize) -> bool {
        self.config.transport != TransportChoice::Tcp && self.same_host(peer) && self.cables(peer).is_none()
    }

    /// Number of TCP connections for the data link to `peer`; RDMA needs one for its handshake.
    pub fn connections(&self, peer: usize) -> usize {
        match self.cables(peer) {
            Some(_) => 1,
            None => self.config.connections.min(self.table[peer].connections).max(1),
        }
    }

    /// True when TCP links encrypt what they carry: if any rank wants it. A rank that wants it does
    /// not depend on the table, which somebody on the network could have changed.
    pub fn is_sealed(&self) -> bool {
        self.config.encrypt || self.table.iter().any(|endpoint| endpoint.sealed)
    }

    /// The ranks by host, where hosts have a board; otherwise each rank is a host of its own.
    pub fn hosts(&self) -> Vec<Vec<usize>> {
        // Under `Rdma`, ranks of one host may have cables between them, and not every rank knows
        // which pairs do.
        let shares = matches!(self.config.transport, TransportChoice::Auto | TransportChoice::Shm);
        let mut hosts: Vec<Vec<usize>> = Vec::new();
        for (peer, endpoint) in self.table.iter().enumerate() {
            match hosts.iter_mut().find(|ranks| shares && self.table[ranks[0]].host == endpoint.host) {
                Some(ranks) => ranks.push(peer),
                None => hosts.push(vec![peer]),
            }
        }
        hosts
    }

    /// The ranks on this rank's board, if its host has several.
    pub fn ranks_on_board(&self, hosts: &[Vec<usize>]) -> Option<Vec<usize>> {
        hosts.iter().find(|ranks| ranks.len() > 1 && ranks.contains(&self.config.rank)).cloned()
    }
}

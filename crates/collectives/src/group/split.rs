//! Divides a group into smaller ones.

use super::Group;
use crate::InitError;
use crate::rendezvous::Endpoint;
use crate::world::BoundEndpoint;

impl Group {
    /// Forms smaller groups: ranks with the same `color` form a group, ordered by `key`, then by
    /// rank. The new group has its own connections, so another thread may use it.
    ///
    /// # Errors
    /// If a rank is lost or the connections cannot be made.
    pub fn split(&mut self, color: u32, key: u32) -> Result<Self, InitError> {
        let mut config = self.config.clone();
        if self.size() == 1 {
            return Ok(Self::alone(config));
        }
        let bound = BoundEndpoint::bind(&config)?;
        let own = serde_json::to_vec(&(color, key, &bound.endpoint))
            .map_err(|error| InitError::system("an address cannot be written")(error.into()))?;
        let mut lengths = vec![0u32; self.size()];
        self.all_gather(&[own.len() as u32], &mut lengths, &vec![1; self.size()])?;
        let counts: Vec<usize> = lengths.iter().map(|length| *length as usize).collect();
        let mut all = vec![0u8; counts.iter().sum()];
        self.all_gather(&own, &mut all, &counts)?;
        let mut members = Vec::new();
        let mut rest = &all[..];
        for (rank, count) in counts.iter().enumerate() {
            let (text, after) = rest.split_at(*count);
            rest = after;
            let (its_color, its_key, endpoint): (u32, u32, Endpoint) = serde_json::from_slice(text)
                .map_err(|error| InitError::system("a rank's address cannot be read")(error.into()))?;
            if its_color == color {
                members.push((its_key, rank, endpoint));
            }
        }
        members.sort_by_key(|(key, rank, _)| (*key, *rank));
        config.rank = members.iter().position(|(_, rank, _)| *rank == self.rank()).unwrap_or_default();
        config.size = members.len();
        if config.size == 1 {
            return Ok(Self::alone(config));
        }
        if let Some(rdma) = &mut config.rdma {
            rdma.renumber(|old| members.iter().position(|(_, rank, _)| *rank == old));
        }
        let table: Vec<Endpoint> = members.into_iter().map(|(_, _, endpoint)| endpoint).collect();
        Self::connect(config, bound, &table)
    }
}

//! Divides a group into smaller ones.

use super::Group;
use crate::rendezvous::Endpoint;
use crate::world::BoundEndpoint;
use crate::{CommError, InitError};

impl Group {
    /// Forms smaller groups: ranks with the same `color` form a group, ordered by `key`, then by
    /// rank. The new group has its own connections, so another thread may use it. A new group of
    /// all ranks also has the costs that [`Group::tune`] has measured.
    ///
    /// # Errors
    /// If a rank is lost, or the connections of any rank cannot be made. In the latter case all
    /// ranks get an error, and this group can still be used.
    pub fn split(&mut self, color: u32, key: u32) -> Result<Self, InitError> {
        let mut config = self.config.clone();
        if self.size() == 1 {
            return Ok(Self::alone(config));
        }
        let bound = BoundEndpoint::bind(&config);
        let endpoint = bound.as_ref().ok().map(|bound| &bound.endpoint);
        let own = serde_json::to_vec(&(color, key, endpoint))
            .map_err(|error| InitError::system("an address cannot be written")(error.into()))?;
        let mut lengths = vec![0u32; self.size()];
        self.all_gather(&[own.len() as u32], &mut lengths, &vec![1; self.size()])?;
        let counts: Vec<usize> = lengths.iter().map(|length| *length as usize).collect();
        let mut all = vec![0u8; counts.iter().sum()];
        self.all_gather(&own, &mut all, &counts)?;
        let mut members = Vec::new();
        let (mut rest, mut failed) = (&all[..], None);
        for (rank, count) in counts.iter().enumerate() {
            let (text, after) = rest.split_at(*count);
            rest = after;
            let (its_color, its_key, endpoint): (u32, u32, Option<Endpoint>) =
                serde_json::from_slice(text)
                    .map_err(|error| InitError::system("a rank's address cannot be read")(error.into()))?;
            match endpoint {
                None => failed = failed.or(Some(rank)),
                Some(endpoint) if its_color == color => members.push((its_key, rank, endpoint)),
                Some(_) => {}
            }
        }
        let bound = match (bound, failed) {
            (bound, None) => bound?,
            (Err(error), _) => return Err(error),
            (Ok(_), Some(rank)) => return Err(InitError::Split { rank }),
        };
        members.sort_by_key(|(key, rank, _)| (*key, *rank));
        config.rank = members.iter().position(|(_, rank, _)| *rank == self.rank()).unwrap_or_default();
        config.size = members.len();
        let has_all = config.size == self.size();
        if let Some(rdma) = &mut config.rdma {
            rdma.renumber(|old| members.iter().position(|(_, rank, _)| *rank == old));
        }
        let table: Vec<Endpoint> = members.into_iter().map(|(_, _, endpoint)| endpoint).collect();
        let made = match config.size {
            1 => Ok(Self::alone(config)),
            _ => Self::connect(config, bound, &table),
        };
        let failed = self.first_failed(made.is_ok())?;
        let mut group = made?;
        if let Some(rank) = failed {
            return Err(InitError::Split { rank });
        }
        if has_all {
            group.set_costs(self.costs());
        }
        Ok(group)
    }

    /// The first rank that says it failed. Waits for ranks that still try to connect.
    fn first_failed(&mut self, is_ok: bool) -> Result<Option<usize>, CommError> {
        let mut failed = [if is_ok { u64::MAX } else { self.rank() as u64 }];
        if self.rank() == 0 {
            for rank in 1..self.size() {
                let mut other = [0];
                self.recv_idle(rank, &mut other)?;
                failed[0] = failed[0].min(other[0]);
            }
        } else {
            self.send_idle(0, &failed)?;
        }
        self.broadcast_idle(0, &mut failed)?;
        Ok((failed[0] != u64::MAX).then_some(failed[0] as usize))
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use crate::{InitError, Op, TransportChoice, local};

    #[test]
    fn a_rank_that_cannot_listen_fails_the_split_on_all_ranks_and_the_group_stays() {
        let taken = TcpListener::bind("0.0.0.0:0").unwrap();
        let port = taken.local_addr().unwrap().port();
        local::run(3, TransportChoice::Tcp, |mut group| {
            let ports = group.config.ports.clone();
            if group.rank() == 1 {
                group.config.ports = Some(port..=port);
            }
            let error = group.split(0, 0).unwrap_err();
            assert_eq!(matches!(error, InitError::Split { rank: 1 }), group.rank() != 1, "{error}");
            group.config.ports = ports;
            let mut sums = [1u32];
            group.split(0, 0).unwrap().all_reduce(&mut sums, Op::Sum).unwrap();
            group.all_reduce(&mut sums, Op::Sum).unwrap();
            assert_eq!(sums, [9]);
        })
        .unwrap();
    }
}

//! The cost of an all-reduce by each algorithm, so that the cheapest can be chosen: one line
//! (latency and time per KiB) per algorithm, guessed at first, measured once the group has been
//! tuned.

use serde::Serialize;

use crate::Algorithm;

/// The cost of one algorithm: `fixed_us + bytes * us_per_kib / 1024`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Cost {
    /// The algorithm.
    pub algorithm: Algorithm,
    /// Time of the shortest message, in µs.
    pub fixed_us: f64,
    /// Time of each further KiB, in µs.
    pub us_per_kib: f64,
}

impl Cost {
    /// The expected time of a message of this many bytes, in µs.
    pub fn predict_us(&self, bytes: usize) -> f64 {
        self.fixed_us + self.us_per_kib * bytes as f64 / 1024.0
    }
}

/// A cost per algorithm.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct CostModel {
    pub costs: [Cost; Algorithm::ALL.len()],
    /// Each host's ranks are consecutive, so all algorithms add in rank order. If one did not,
    /// choosing it would make a result depend on the message's length.
    in_order: bool,
    /// All ranks share a board. Algorithms over the links between them are then never chosen,
    /// whatever the probe says: its two sizes do not show that long messages are read directly from
    /// memory.
    board: bool,
}

impl CostModel {
    /// A guess from the number of ranks and of hosts; ranks that share a board are on one host and
    /// share its wire. Each step costs a latency, each byte the wire's time, each added byte the
    /// loop's. On a board each rank writes its bytes once and the others read them. The costs of
    /// the board and of the loop were measured on a virtual machine with 2 cores; the wire is 10
    /// Gbit/s.
    pub fn guess(hosts: &[Vec<usize>]) -> Self {
        let in_order = hosts.iter().flatten().is_sorted();
        let (ranks, hosts) = (hosts.iter().flatten().count(), hosts.len());
        const BOARD_STEP_US: f64 = 0.4;
        const BOARD_US_PER_KIB: f64 = 0.06;
        const WIRE_STEP_US: f64 = 15.0;
        const WIRE_US_PER_KIB: f64 = 0.8;
        const ADD_US_PER_KIB: f64 = 0.05;
        let (ranks, hosts) = (ranks.max(2) as f64, hosts as f64);
        let board = hosts == 1.0;
        let per_host = ranks / hosts;
        let (others, local_others, remote) = (ranks - 1.0, (per_host - 1.0).max(0.0), ranks - per_host);
        let step_us = if board { BOARD_STEP_US } else { WIRE_STEP_US };
        // A pair's rings are written and read.
        let links_us_per_kib = 2.0 * BOARD_US_PER_KIB;
        let chain = |stations: f64| (2.0 * (stations - 1.0), if stations > 2.0 { 2.0 } else { 1.0 });
        let costs = Algorithm::ALL.map(|algorithm| {
            let (fixed_us, moved_us, added) = match algorithm {
                Algorithm::OneShot if board => (step_us, BOARD_US_PER_KIB * ranks, others),
                Algorithm::OneShot => {
                    let moved = WIRE_US_PER_KIB * per_host * remote + links_us_per_kib * local_others;
                    (step_us, moved, others)
                }
                // On a board the results are copied to it and back.
                Algorithm::Mesh if board => {
                    (2.0 * step_us, BOARD_US_PER_KIB * (2.0 + 2.0 * others / ranks), others / ranks)
                }
                Algorithm::Mesh => {
                    let moved = WIRE_US_PER_KIB * per_host * remote + links_us_per_kib * local_others;
                    (2.0 * step_us, 2.0 * moved / ranks, others / ranks)
                }
                Algorithm::Chain => {
                    let (steps, sent) = chain(ranks);
                    let us_per_kib = if board { links_us_per_kib } else { WIRE_US_PER_KIB };
                    (steps * step_us, sent * us_per_kib, 1.0)
                }
                // Both directions share one wire.
                Algorithm::Ring => {
                    let us_per_kib = if board { links_us_per_kib } else { WIRE_US_PER_KIB };
                    (2.0 * others * step_us, 2.0 * others / ranks * us_per_kib, others / ranks)
                }
                Algorithm::Hierarchical => {
                    let (steps, sent) = if board { (0.0, 0.0) } else { chain(hosts) };
                    let (fixed, moved) =
                        if local_others > 0.0 { (2.0, 3.0 + local_others) } else { (0.0, 0.0) };
                    let fixed = steps * step_us + fixed * BOARD_STEP_US;
                    (fixed, sent * WIRE_US_PER_KIB + moved * BOARD_US_PER_KIB, 1.0 + local_others)
                }
            };
            Cost { algorithm, fixed_us, us_per_kib: moved_us + added * ADD_US_PER_KIB }
        });
        Self { costs, in_order, board }
    }

    /// The cheapest algorithm for this many bytes. Only algorithms that add in rank order, unless
    /// `any_order`.
    pub fn choose(&self, bytes: usize, any_order: bool) -> Algorithm {
        let mut best = &self.costs[0];
        for cost in &self.costs[1..] {
            let fits = match cost.algorithm {
                Algorithm::OneShot | Algorithm::Mesh => true,
                Algorithm::Chain => !self.board,
                Algorithm::Hierarchical => !self.board && (self.in_order || any_order),
                Algorithm::Ring => !self.board && any_order,
            };
            if fits && cost.predict_us(bytes) < best.predict_us(bytes) {
                best = cost;
            }
        }
        best.algorithm
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn even(ranks: usize, hosts: usize) -> Vec<Vec<usize>> {
        let each = ranks / hosts;
        (0..hosts).map(|host| (host * each..(host + 1) * each).collect()).collect()
    }

    #[test]
    fn short_messages_take_one_step_and_long_ones_a_mesh() {
        for ranks in 2..=8 {
            for hosts in [1, ranks] {
                let model = CostModel::guess(&even(ranks, hosts));
                assert_eq!(model.choose(64, false), Algorithm::OneShot);
                // With two ranks on a board, one-shot moves no more bytes than the others.
                let long = if (ranks, hosts) == (2, 1) { Algorithm::OneShot } else { Algorithm::Mesh };
                assert_eq!(model.choose(1 << 20, false), long, "{ranks} ranks on {hosts} hosts");
            }
        }
    }

    #[test]
    fn long_messages_between_hosts_of_several_ranks_cross_the_wire_once() {
        for (ranks, hosts) in [(4, 2), (8, 2), (12, 4)] {
            let chosen = CostModel::guess(&even(ranks, hosts)).choose(256 << 10, false);
            assert_eq!(chosen, Algorithm::Hierarchical, "{ranks} ranks on {hosts} hosts");
        }
        let scattered = CostModel::guess(&[vec![0, 2], vec![1, 3]]);
        assert_ne!(
            scattered.choose(256 << 10, false),
            Algorithm::Hierarchical,
            "it would not add in rank order"
        );
    }

    #[test]
    fn ranks_on_a_board_use_it_whatever_the_probe_says() {
        let mut model = CostModel::guess(&even(3, 1));
        for cost in &mut model.costs {
            let on_board = matches!(cost.algorithm, Algorithm::OneShot | Algorithm::Mesh);
            cost.us_per_kib = if on_board { 0.02 } else { 0.01 };
        }
        for any_order in [false, true] {
            assert!(matches!(model.choose(16 << 20, any_order), Algorithm::OneShot | Algorithm::Mesh));
        }
    }

    #[test]
    fn a_ring_is_chosen_only_if_the_order_does_not_matter() {
        let mut model = CostModel::guess(&even(4, 4));
        for cost in model.costs.iter_mut().filter(|cost| cost.algorithm == Algorithm::Ring) {
            (cost.fixed_us, cost.us_per_kib) = (0.0, 0.0);
        }
        assert_eq!(model.choose(1 << 20, true), Algorithm::Ring);
        assert_ne!(model.choose(1 << 20, false), Algorithm::Ring);
    }
}

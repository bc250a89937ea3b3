//! Nodes that share a machine: while others compute, each gets less memory bandwidth.

use crate::MachineSpeed;

/// A node's speed, measured twice.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SharedSpeed {
    /// While no other node of the machine computes.
    pub alone: MachineSpeed,
    /// While all nodes of the machine compute.
    pub together: MachineSpeed,
}

/// The speed of `own` while the nodes of `busy`, including `own`, compute. `all` are the nodes of
/// the machine, including those of `busy`.
///
/// The machine's limit is the total speed that all its nodes reached together. Below the limit,
/// each node has the same speed as alone; above it, all are slowed by the same factor.
pub fn speed_among(own: &SharedSpeed, busy: &[SharedSpeed], all: &[SharedSpeed]) -> MachineSpeed {
    let rate = |of: fn(&MachineSpeed) -> f64| {
        let wanted: f64 = busy.iter().map(|node| of(&node.alone)).sum();
        let most: f64 = all.iter().map(|node| of(&node.together)).sum();
        let (alone, together) = (of(&own.alone), of(&own.together));
        // Noise may make a node faster in company.
        (alone * (most / wanted).min(1.0)).max(together).min(alone)
    };
    // The other costs of a step grow with each computing node.
    let company = busy.len().saturating_sub(1) as f64 / all.len().saturating_sub(1).max(1) as f64;
    let seconds = |of: fn(&MachineSpeed) -> f64| {
        of(&own.alone) + (of(&own.together) - of(&own.alone)).max(0.0) * company
    };
    MachineSpeed {
        memory_bytes_s: rate(|speed| speed.memory_bytes_s),
        prompt_flops: rate(|speed| speed.prompt_flops),
        decode_flops: rate(|speed| speed.decode_flops),
        attention_flops: own.alone.attention_flops.map(|_| rate(attention_rate)),
        fixed_s: seconds(|speed| speed.fixed_s),
        layer_s: seconds(|speed| speed.layer_s),
        exchange: own.alone.exchange,
    }
}

fn attention_rate(speed: &MachineSpeed) -> f64 {
    speed.attention_flops.unwrap_or(speed.decode_flops)
}

/// Average bytes a second for each node of `busy` in a step that all begin together, each with its
/// share of the bytes. After one has read its bytes, the others get more. `all` as in
/// [`speed_among`].
pub fn memory_rates(busy: &[SharedSpeed], shares: &[f64], all: &[SharedSpeed]) -> Vec<f64> {
    let mut left = shares.to_vec();
    let (mut rates, mut now) = (vec![0.0; busy.len()], 0.0);
    loop {
        let reading: Vec<usize> = (0..busy.len()).filter(|node| left[*node] > 0.0).collect();
        let speeds: Vec<SharedSpeed> = reading.iter().map(|node| busy[*node]).collect();
        let rate = |node: &usize| speed_among(&busy[*node], &speeds, all).memory_bytes_s.max(1.0);
        let of_reading: Vec<f64> = reading.iter().map(rate).collect();
        let first = reading.iter().zip(&of_reading).map(|(node, rate)| left[*node] / rate);
        let Some(time) = first.reduce(f64::min) else { return rates };
        now += time;
        for (node, rate) in reading.iter().zip(of_reading) {
            left[*node] -= rate * time;
            // The rest is a rounding error of the subtraction.
            if left[*node] <= shares[*node] * 1e-9 {
                left[*node] = 0.0;
                rates[*node] = shares[*node] / now;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(alone: f64, together: f64) -> SharedSpeed {
        let speed = |memory_bytes_s: f64, fixed_s: f64| MachineSpeed {
            memory_bytes_s,
            prompt_flops: 1e12,
            decode_flops: 1e12,
            attention_flops: Some(memory_bytes_s / 4.0),
            fixed_s,
            layer_s: fixed_s / 10.0,
            exchange: None,
        };
        SharedSpeed { alone: speed(alone, 1e-4), together: speed(together, 3e-4) }
    }

    #[test]
    fn a_node_gets_its_own_rate_until_the_machine_gives_no_more() {
        // Three nodes of 40 GB/s on a machine of 60.
        let all = [node(40e9, 20e9); 3];
        let of = |busy: usize| speed_among(&all[0], &all[..busy], &all);
        assert_eq!(of(1), all[0].alone);
        assert!((of(2).memory_bytes_s - 30e9).abs() < 1.0, "{:?}", of(2));
        assert_eq!((of(3).memory_bytes_s, of(3).attention_flops), (20e9, Some(5e9)));
        assert!((of(2).fixed_s - 2e-4).abs() < 1e-12, "half of the company, half of the cost");
        assert!((of(2).layer_s - 2e-5).abs() < 1e-12, "{:?}", of(2));
        // With their own cores and enough memory bandwidth for all, nothing is shared.
        assert_eq!(of(3).prompt_flops, 1e12);
    }

    #[test]
    fn the_last_node_to_read_has_the_memory_to_itself() {
        let all = [node(36e9, 21e9); 2];
        let rates = memory_rates(&all, &[2.0, 1.0], &all);
        // Half of its share at 21 GB/s, half at 36.
        assert!((rates[0] - 2.0 / (1.0 / 21e9 + 1.0 / 36e9)).abs() < 1e3, "{rates:?}");
        assert!((rates[1] - 21e9).abs() < 1e3, "{rates:?}");
        let even = memory_rates(&all, &[1.0, 1.0], &all);
        assert!(even.iter().all(|rate| (rate - 21e9).abs() < 1e3), "{even:?}");
        assert_eq!(memory_rates(&all[..1], &[5.0], &all), [36e9]);
        assert_eq!(memory_rates(&[], &[], &all), [0.0; 0]);
    }

    #[test]
    fn uneven_nodes_keep_what_they_reached_together_and_noise_makes_none_faster() {
        let all = [node(50e9, 30e9), node(10e9, 10e9)];
        assert_eq!(speed_among(&all[1], &all, &all).memory_bytes_s, 10e9);
        assert!(speed_among(&all[0], &all, &all).memory_bytes_s < 34e9);
        let noisy = [node(40e9, 44e9); 2];
        assert_eq!(speed_among(&noisy[0], &noisy, &noisy).memory_bytes_s, 40e9);
    }
}

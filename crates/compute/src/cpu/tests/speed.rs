//! Temporary: the old kernel against the new one.
use crate::cpu::dispatch::entry;
use crate::cpu::isa::Isa;
use crate::cpu::recurrence::{StateToken, state_token_on, unit};
use crate::cpu::simd::{LANES, Simd};
use std::time::Instant;

/// One value head's inputs of a row.
#[derive(Debug, Clone, Copy)]
struct DeltaHead<'a> {
    pub query: &'a [f32],
    pub key: &'a [f32],
    pub value: &'a [f32],
    /// Before the sigmoid.
    pub beta: f32,
    /// Factor of the state.
    pub decay: f32,
}

/// One token of the delta rule, see [`crate::Backend::delta_rule`]. `state` is
/// `[key_dim][value_dim]`.
///
/// # Safety
/// The CPU has `S`.
#[inline(always)]
unsafe fn delta_token<S: Simd>(head: &DeltaHead<'_>, state: &mut [f32], out: &mut [f32]) {
    let (key_dim, value_dim) = (head.key.len(), head.value.len());
    assert!(head.query.len() == key_dim && state.len() == key_dim * value_dim && out.len() == value_dim);
    let beta = 1.0 / (1.0 + (-head.beta).exp());
    let query_factor = inverse_length(head.query) / (key_dim as f32).sqrt();
    let key_factor = inverse_length(head.key);
    let whole = value_dim / LANES * LANES;
    for first in (0..whole).step_by(LANES) {
        // SAFETY: 16 columns of the state from `first` on, in each of its rows.
        unsafe {
            let column = |k: usize| state.as_ptr().add(k * value_dim + first);
            let mut known = S::splat(0.0);
            for (k, key) in head.key.iter().enumerate() {
                known = S::fma(S::load(column(k)), S::splat(key * key_factor * head.decay), known);
            }
            let delta = S::mul(S::sub(S::load(head.value.as_ptr().add(first)), known), S::splat(beta));
            let mut sum = S::splat(0.0);
            for (k, (key, query)) in head.key.iter().zip(head.query).enumerate() {
                let decayed = S::mul(S::load(column(k)), S::splat(head.decay));
                let updated = S::fma(delta, S::splat(key * key_factor), decayed);
                S::store(column(k).cast_mut(), updated);
                sum = S::fma(updated, S::splat(query * query_factor), sum);
            }
            S::store(out.as_mut_ptr().add(first), sum);
        }
    }
    for v in whole..value_dim {
        let known: f32 =
            head.key.iter().enumerate().map(|(k, key)| state[k * value_dim + v] * key * key_factor).sum();
        let delta = (head.value[v] - known * head.decay) * beta;
        out[v] = 0.0;
        for (k, (key, query)) in head.key.iter().zip(head.query).enumerate() {
            let s = &mut state[k * value_dim + v];
            *s = *s * head.decay + delta * key * key_factor;
            out[v] += *s * query * query_factor;
        }
    }
}

entry! {
    /// One token of one head of the delta rule.
    fn delta_token_on(head: &DeltaHead<'_>, state: &mut [f32], out: &mut [f32]) = delta_token
}

/// `1 / √(Σ x² + 1e-6)`.
fn inverse_length(x: &[f32]) -> f32 {
    1.0 / (x.iter().map(|x| x * x).sum::<f32>() + 1e-6).sqrt()
}

#[test]
fn speed_of_the_delta_rule() {
    let isa = Isa::detect().unwrap();
    for dim in [64usize, 128] {
        let x: Vec<f32> = (0..dim).map(|i| ((i * 37 % 19) as f32 - 9.0) / 10.0).collect();
        // As many heads as do not fit the L2 cache.
        let heads = 64;
        let mut state = vec![0.01f32; heads * dim * dim];
        let mut out = vec![0.0; dim];
        let mut best = [f64::MAX; 2];
        for _ in 0..12 {
            let t = Instant::now();
            for _ in 0..40 {
                for state in state.chunks_exact_mut(dim * dim) {
                    let head = DeltaHead { query: &x, key: &x, value: &x, beta: 0.3, decay: 0.99 };
                    unsafe { delta_token_on(isa, &head, state, &mut out) };
                }
            }
            best[0] = best[0].min(t.elapsed().as_secs_f64());
            let t = Instant::now();
            let (mut q, mut k, mut d) = ([0.0; 1024], [0.0; 1024], [0.0; 1024]);
            for _ in 0..40 {
                for state in state.chunks_exact_mut(dim * dim) {
                    unit(&x, (dim as f32).sqrt(), &mut q);
                    unit(&x, 1.0, &mut k);
                    d[..dim].fill(0.99);
                    let token = StateToken {
                        query: &q[..dim],
                        key: &k[..dim],
                        value: &x,
                        decays: &d[..dim],
                        strength: Some(0.57),
                    };
                    unsafe { state_token_on(isa, &token, state, &mut out) };
                }
            }
            best[1] = best[1].min(t.elapsed().as_secs_f64());
        }
        println!(
            "width {dim}: old {:.2} us a head, new {:.2}",
            best[0] / 2560.0 * 1e6,
            best[1] / 2560.0 * 1e6
        );
    }
}

//! How much memory a rank may use, and how many tokens its KV cache then holds.

use thunder_model::{ModelError, ShardFootprint};

/// Tokens that a KV cache holds at least when no context was asked for.
const LEAST_TOKENS: usize = 256;

/// Bytes that rank `rank` may use of the `available` bytes of its host.
///
/// If all ranks of the group share the host, each may use what its share of all weights is. If not,
/// the host's `local_ranks` ranks get equal parts: their neighbours' shares are then not known
/// here.
pub fn rank_budget(available: u64, footprints: &[ShardFootprint], rank: usize, local_ranks: usize) -> u64 {
    if local_ranks < footprints.len() {
        return available / local_ranks.max(1) as u64;
    }
    let all: u64 = footprints.iter().map(|footprint| footprint.weight_bytes).sum();
    let own = footprints[rank].weight_bytes;
    (u128::from(available) * u128::from(own) / u128::from(all.max(1))) as u64
}

/// What a rank's KV cache should hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvCacheRequest {
    /// Requests that decode together.
    pub sequences: usize,
    /// Tokens that one of them may have.
    pub context: usize,
    /// Whether the context was asked for, so that a shorter one is an error.
    pub is_required: bool,
}

/// Tokens that the KV cache of rank `rank` holds: every sequence's full context, or as many as fit
/// in `budget` bytes next to the weights and every sequence's state. A tenth of the budget stays
/// free for buffers and for the rest of the host. `None`: memory is not known, and not a limit.
///
/// # Errors
/// [`ModelError::DoesNotFit`] when not even one required context fits, or 256 tokens if none is
/// required.
pub fn kv_cache_tokens(
    footprint: &ShardFootprint,
    rank: usize,
    budget: Option<u64>,
    request: KvCacheRequest,
) -> Result<u64, ModelError> {
    let wanted = (request.context * request.sequences) as u64;
    let Some(budget) = budget else { return Ok(wanted) };
    let states = footprint.state_bytes_per_sequence * request.sequences as u64;
    let for_cache = (budget * 9 / 10).saturating_sub(footprint.weight_bytes + states);
    let fitting = for_cache / footprint.kv_bytes_per_token.max(1);
    let least = if request.is_required { request.context } else { request.context.min(LEAST_TOKENS) };
    if fitting < least as u64 {
        return Err(ModelError::DoesNotFit {
            rank,
            weights: footprint.weight_bytes,
            kv: states + least as u64 * footprint.kv_bytes_per_token,
            tokens: least,
            available: budget,
        });
    }
    Ok(wanted.min(fitting))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn footprint(weight_bytes: u64, kv_bytes_per_token: u64) -> ShardFootprint {
        let none = 0..0;
        ShardFootprint {
            layers: 0..1,
            queries: none.clone(),
            kv: none.clone(),
            channels: none.clone(),
            vocab: none,
            weight_bytes,
            routed_bytes: 0,
            experts: 0,
            chosen: 0,
            kv_bytes_per_token,
            state_bytes_per_sequence: 0,
        }
    }

    const REQUEST: KvCacheRequest = KvCacheRequest { sequences: 4, context: 1000, is_required: false };

    #[test]
    fn ranks_of_one_host_share_its_memory_by_their_weights() {
        let footprints = [footprint(300, 1), footprint(100, 1)];
        let budgets = [0, 1].map(|rank| rank_budget(4000, &footprints, rank, 2));
        assert_eq!(budgets, [3000, 1000]);
    }

    #[test]
    fn ranks_on_several_hosts_divide_each_hosts_memory_evenly() {
        let footprints = [3, 1, 1, 1].map(|weight| footprint(100 * weight, 1));
        assert_eq!(rank_budget(4000, &footprints, 0, 2), 2000);
        assert_eq!(rank_budget(4000, &footprints, 0, 1), 4000);
    }

    #[test]
    fn a_budget_of_every_byte_there_is_does_not_overflow() {
        let footprints = [footprint(u64::MAX / 4, 1), footprint(u64::MAX / 4, 1)];
        assert_eq!(rank_budget(u64::MAX - 1, &footprints, 0, 2), u64::MAX / 2);
    }

    #[test]
    fn the_cache_holds_every_sequences_context_if_it_fits() {
        let footprint = footprint(1000, 10);
        assert_eq!(kv_cache_tokens(&footprint, 0, None, REQUEST).expect("no limit"), 4000);
        assert_eq!(kv_cache_tokens(&footprint, 0, Some(1 << 20), REQUEST).expect("room"), 4000);
        // Nine tenths of 20,000 bytes are 18,000, less 1000 for the weights.
        assert_eq!(kv_cache_tokens(&footprint, 0, Some(20_000), REQUEST).expect("less room"), 1700);
    }

    #[test]
    fn states_of_all_sequences_leave_less_for_tokens() {
        let footprint = ShardFootprint { state_bytes_per_sequence: 1000, ..footprint(1000, 10) };
        // Of the 17,000 bytes next to the weights, four sequences' states take 4000.
        assert_eq!(kv_cache_tokens(&footprint, 0, Some(20_000), REQUEST).expect("room"), 1300);
        assert!(kv_cache_tokens(&footprint, 0, Some(5_000), REQUEST).is_err(), "the states do not fit");
    }

    #[test]
    fn a_cache_that_is_too_small_is_an_error_that_says_what_is_needed() {
        let tokens = |budget, is_required| {
            kv_cache_tokens(&footprint(1000, 10), 3, Some(budget), KvCacheRequest { is_required, ..REQUEST })
        };
        // 256 tokens take 2560 bytes, 1000 tokens 10,000.
        assert_eq!(tokens(4000, false).expect("room for 256"), 260);
        for (budget, is_required, least) in [(3900, false, 256), (12_000, true, 1000)] {
            match tokens(budget, is_required) {
                Err(ModelError::DoesNotFit { rank: 3, weights: 1000, kv, tokens, available }) => {
                    assert_eq!((kv, tokens, available), (10 * least as u64, least, budget));
                }
                other => panic!("{budget} bytes: {other:?}"),
            }
        }
        assert!(tokens(900, false).is_err(), "the weights alone do not fit");
    }
}

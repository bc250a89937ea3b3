//! How much memory a rank may use, and how many tokens its KV cache can hold.

use thunder_compute::step::KV_BLOCK_TOKENS;
use thunder_model::{ModelError, ModelSpec, ShardFootprint};

use super::spec::{EngineSpec, PlanError, SpecError};

/// Minimum tokens of a KV cache if no context was requested.
const LEAST_TOKENS: usize = 256;

/// Without a limit from the user, the KV cache gets this fraction of the memory that the weights
/// leave. The rest is for other programs, such as a desktop or a second server.
const DEFAULT_DIVISOR: u64 = 3;

/// Rows of an encoder's step, unless a text is longer. With more rows kernels are no faster, and
/// activations of fewer rows stay in the CPU's caches.
pub const ENCODER_ROWS: usize = 512;

/// The memory of a rank's device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DeviceMemory {
    /// Bytes for weights, cache and buffers, if the system reports them.
    pub bytes: Option<u64>,
    /// Bytes of the largest buffer, if the device limits it.
    pub largest_buffer: Option<u64>,
    /// States of sequences that the device keeps in addition to those of its caller.
    pub other_states: usize,
    /// Bytes of what experts compute of a prompt's rows, if a model has experts.
    pub expert_bytes: u64,
}

/// The ranks that a rank shares memory with, including itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Neighbours {
    /// Ranks of its host.
    host: Vec<usize>,
    /// Those whose device has the same memory: a GPU of its own, or the host's memory.
    memory: Vec<usize>,
    /// Number of different memories that the host's ranks use.
    memories: u64,
}

impl Neighbours {
    /// Those of rank `rank`, where `places[i]` are rank i's host and memory.
    pub fn new(rank: usize, places: &[(u64, u64)]) -> Self {
        let of = |is: &dyn Fn(&(u64, u64)) -> bool| (0..places.len()).filter(|i| is(&places[*i])).collect();
        let host: Vec<usize> = of(&|place| place.0 == places[rank].0);
        let mut memories: Vec<u64> = host.iter().map(|other| places[*other].1).collect();
        memories.sort_unstable();
        memories.dedup();
        Self { memory: of(&|place| *place == places[rank]), memories: memories.len() as u64, host }
    }
}

/// Memory that a rank may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryBudget {
    /// Bytes for weights, KV cache and buffers.
    pub bytes: u64,
    /// Whether the user has set the limit. If not, the KV cache leaves some memory to others.
    pub is_set: bool,
}

impl MemoryBudget {
    /// The budget of rank `rank`, whose memory has `available` bytes: this memory divided among the
    /// ranks that share it, in proportion to their weights. If the user has set a limit, the host's
    /// ranks may use only `asked` bytes in all, divided likewise. `None` if the system does not
    /// report its memory, and nothing was asked for.
    ///
    /// # Errors
    /// If more is asked for than there is.
    pub fn new(
        available: Option<u64>,
        asked: Option<u64>,
        footprints: &[ShardFootprint],
        rank: usize,
        neighbours: &Neighbours,
    ) -> Result<Option<Self>, SpecError> {
        let of_host = available.map(|available| available.saturating_mul(neighbours.memories));
        if let (Some(available), Some(asked)) = (of_host, asked)
            && asked > available
        {
            return Err(SpecError::Memory { asked, available });
        }
        let own = footprints[rank].weight_bytes;
        let share = |bytes: u64, ranks: &[usize]| {
            let all: u64 = ranks.iter().map(|rank| footprints[*rank].weight_bytes).sum();
            (u128::from(bytes) * u128::from(own) / u128::from(all.max(1))) as u64
        };
        let of_asked = asked.map(|asked| share(asked, &neighbours.host));
        let of_memory = available.map(|available| share(available, &neighbours.memory));
        let bytes = of_asked.into_iter().chain(of_memory).min();
        Ok(bytes.map(|bytes| Self { bytes, is_set: asked.is_some() }))
    }
}

/// The requested size of a rank's KV cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvCacheRequest {
    /// Requests that decode together.
    pub sequences: usize,
    /// Sequences' states and saved copies of states, if the model has states.
    pub states: usize,
    /// Maximum tokens of a request.
    pub context: usize,
    /// Whether the context was requested explicitly, so that a shorter one is an error.
    pub is_required: bool,
}

impl KvCacheRequest {
    /// The cache of an engine for a model, with sequences of this context.
    pub fn of(engine: &EngineSpec, model: &ModelSpec, context: usize) -> Self {
        if model.encoder.is_some() {
            // The keys and values of one layer in one step. Each text begins a new block, and the
            // scheduler counts one token more.
            let context = context.max(ENCODER_ROWS) + engine.max_batch * KV_BLOCK_TOKENS;
            return Self { sequences: 1, states: 0, context, is_required: true };
        }
        Self {
            sequences: engine.max_batch,
            states: engine.max_batch + engine.snapshots(),
            context,
            is_required: engine.context.is_some(),
        }
    }
}

/// Tokens that the KV cache of rank `rank` holds: every sequence's full context, or as many as fit
/// in the budget next to the weights and every sequence's state. A tenth of the budget stays free
/// for buffers and for the rest of the host. If the user has not set the budget, the cache takes a
/// third of the remaining memory, or a required context if that is more. `None`: memory is not a
/// limit. No buffer of the cache exceeds the device's largest, unless not even the least tokens fit
/// in it: then the device reports it. `device.bytes` is not looked at: `budget` is a part of it.
///
/// # Errors
/// [`ModelError::DoesNotFit`] if not even one required context fits, or 256 tokens if none is
/// required.
pub fn kv_cache_tokens(
    footprint: &ShardFootprint,
    rank: usize,
    budget: Option<MemoryBudget>,
    request: KvCacheRequest,
    device: DeviceMemory,
) -> Result<u64, ModelError> {
    let least = if request.is_required { request.context } else { request.context.min(LEAST_TOKENS) };
    let in_buffer = device.largest_buffer.map_or(u64::MAX, |bytes| {
        let tokens = bytes / footprint.largest_kv_bytes_per_token.max(1);
        (tokens / KV_BLOCK_TOKENS as u64 * KV_BLOCK_TOKENS as u64).max(least as u64)
    });
    let wanted = ((request.context * request.sequences) as u64).min(in_buffer);
    let Some(budget) = budget else { return Ok(wanted) };
    let states = footprint.state_bytes_per_sequence * (request.states + device.other_states) as u64;
    let of_experts = if footprint.experts > 0 { device.expert_bytes } else { 0 };
    let usable = (budget.bytes / 10 * 9).saturating_sub(of_experts);
    let for_cache = usable.saturating_sub(footprint.weight_bytes + states);
    let fitting = for_cache / footprint.kv_bytes_per_token.max(1);
    if fitting < least as u64 {
        return Err(ModelError::DoesNotFit {
            rank,
            weights: footprint.weight_bytes,
            kv: states + least as u64 * footprint.kv_bytes_per_token,
            tokens: least,
            usable,
            available: budget.bytes,
        });
    }
    let allowed = if budget.is_set { fitting } else { (fitting / DEFAULT_DIVISOR).max(least as u64) };
    Ok(wanted.min(allowed))
}

/// The KV cache of an engine, for people.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvCacheSize {
    /// Tokens of all sequences together.
    pub tokens: usize,
    /// Bytes on all ranks together, including the sequences' states.
    pub bytes: u64,
    /// Tokens that the maximum number of sequences could use with the maximum context.
    pub wanted: usize,
}

impl KvCacheSize {
    /// The cache of ranks that all run on one host and use `memories` devices in turn, each with
    /// this memory. If `asked` is given, the ranks may use only that much.
    ///
    /// # Errors
    /// If the model does not fit, or more is asked for than there is.
    pub fn plan(
        footprints: &[ShardFootprint],
        (memory, memories): (DeviceMemory, usize),
        asked: Option<u64>,
        request: KvCacheRequest,
    ) -> Result<Self, PlanError> {
        let places: Vec<_> = (0..footprints.len()).map(|rank| (0, (rank % memories.max(1)) as u64)).collect();
        let mut least = u64::MAX;
        for (rank, footprint) in footprints.iter().enumerate() {
            let neighbours = Neighbours::new(rank, &places);
            let budget = MemoryBudget::new(memory.bytes, asked, footprints, rank, &neighbours)?;
            least = least.min(kv_cache_tokens(footprint, rank, budget, request, memory)?);
        }
        let blocks = least.div_ceil(KV_BLOCK_TOKENS as u64) as usize;
        Ok(Self::new(footprints, blocks * KV_BLOCK_TOKENS, request))
    }

    /// The cache of ranks with these footprints.
    pub fn new(footprints: &[ShardFootprint], tokens: usize, request: KvCacheRequest) -> Self {
        let of_rank = |footprint: &ShardFootprint| {
            footprint.kv_bytes_per_token * tokens as u64
                + footprint.state_bytes_per_sequence * request.states as u64
        };
        let bytes = footprints.iter().map(of_rank).sum();
        Self { tokens, bytes, wanted: request.context * request.sequences }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn footprint(weight_bytes: u64, kv_bytes_per_token: u64) -> ShardFootprint {
        ShardFootprint { weight_bytes, kv_bytes_per_token, ..Default::default() }
    }

    const REQUEST: KvCacheRequest =
        KvCacheRequest { sequences: 4, states: 4, context: 1000, is_required: false };

    /// Ranks on these hosts, which use their hosts' memory.
    fn on(rank: usize, hosts: &[u64]) -> Neighbours {
        let places: Vec<_> = hosts.iter().map(|host| (*host, 0)).collect();
        Neighbours::new(rank, &places)
    }

    /// The budget of a rank without a limit set by the user.
    fn budget(available: u64, footprints: &[ShardFootprint], rank: usize, hosts: &[u64]) -> u64 {
        let neighbours = on(rank, hosts);
        let budget = MemoryBudget::new(Some(available), None, footprints, rank, &neighbours);
        budget.expect("nothing was asked for").expect("known").bytes
    }

    fn set(bytes: u64) -> Option<MemoryBudget> {
        Some(MemoryBudget { bytes, is_set: true })
    }

    #[test]
    fn ranks_of_one_host_share_its_memory_by_their_weights() {
        let footprints = [300, 100, 500].map(|weights| footprint(weights, 1));
        let hosts = [0, 0, 1];
        assert_eq!([0, 1].map(|rank| budget(4000, &footprints, rank, &hosts)), [3000, 1000]);
        assert_eq!(budget(4000, &footprints, 2, &hosts), 4000, "a host of its own");
    }

    #[test]
    fn a_budget_of_every_byte_there_is_does_not_overflow() {
        let footprints = [footprint(u64::MAX / 4, 1), footprint(u64::MAX / 4, 1)];
        assert_eq!(budget(u64::MAX - 1, &footprints, 0, &[0, 0]), u64::MAX / 2);
        let all = MemoryBudget { bytes: u64::MAX, is_set: false };
        assert_eq!(
            kv_cache_tokens(&footprint(1, 1), 0, Some(all), REQUEST, DeviceMemory::default()).expect("room"),
            4000
        );
    }

    #[test]
    fn a_limit_from_the_user_is_divided_and_must_be_there() {
        let footprints = [footprint(300, 1), footprint(100, 1)];
        let both = on(1, &[0, 0]);
        let budget = |asked| MemoryBudget::new(Some(4000), Some(asked), &footprints, 1, &both);
        assert_eq!(budget(2000), Ok(set(500)));
        assert_eq!(budget(4001), Err(SpecError::Memory { asked: 4001, available: 4000 }));
        assert_eq!(MemoryBudget::new(None, None, &footprints, 1, &both), Ok(None));
        assert_eq!(MemoryBudget::new(None, Some(2000), &footprints, 1, &both), Ok(set(500)));
    }

    fn memory(bytes: u64) -> DeviceMemory {
        DeviceMemory { bytes: Some(bytes), ..DeviceMemory::default() }
    }

    #[test]
    fn ranks_with_gpus_of_their_own_do_not_share_memory() {
        let footprints = [footprint(300, 1), footprint(100, 1), footprint(100, 1)];
        let of = |rank, asked, memories: [u64; 3]| {
            let neighbours = Neighbours::new(rank, &memories.map(|memory| (7, memory)));
            MemoryBudget::new(Some(4000), asked, &footprints, rank, &neighbours)
        };
        let bytes = |rank, asked, memories| of(rank, asked, memories).expect("there").expect("known").bytes;
        assert_eq!([0, 1, 2].map(|rank| bytes(rank, None, [1, 2, 3])), [4000; 3]);
        assert_eq!([0, 1, 2].map(|rank| bytes(rank, None, [1, 2, 2])), [4000, 2000, 2000]);
        assert_eq!(bytes(0, Some(6000), [1, 2, 3]), 3600, "a limit is for the host");
        assert_eq!(bytes(1, Some(8000), [1, 1, 2]), 1000, "and no more than the rank's memory has");
        assert_eq!(of(0, Some(8001), [1, 1, 2]), Err(SpecError::Memory { asked: 8001, available: 8000 }));
        let plan = |memories| KvCacheSize::plan(&footprints, (memory(4000), memories), None, REQUEST);
        assert!(plan(3).expect("room").tokens > plan(1).expect("room").tokens);
    }

    #[test]
    fn no_buffer_of_the_cache_exceeds_what_the_device_binds() {
        let footprint = ShardFootprint { largest_kv_bytes_per_token: 4, ..footprint(1000, 10) };
        let tokens = |budget, bytes| {
            let device = DeviceMemory { largest_buffer: Some(bytes), ..DeviceMemory::default() };
            kv_cache_tokens(&footprint, 0, budget, REQUEST, device)
        };
        assert_eq!(tokens(set(1 << 20), 4 * 1000 - 1).expect("room"), 992, "whole blocks");
        assert_eq!(tokens(None, 4 * 1000).expect("room"), 992);
        assert_eq!(tokens(set(1 << 20), 1 << 20).expect("room"), 4000);
        assert_eq!(tokens(set(1 << 20), 8).expect("room"), 256, "the device reports it");
    }

    #[test]
    fn what_a_device_needs_for_itself_is_not_for_the_cache() {
        let footprint = ShardFootprint { state_bytes_per_sequence: 100, experts: 8, ..footprint(1000, 10) };
        let of =
            |footprint: &ShardFootprint, device| kv_cache_tokens(footprint, 0, set(20_000), REQUEST, device);
        let none = DeviceMemory::default();
        assert_eq!(of(&footprint, none).expect("room"), 1660);
        assert_eq!(of(&footprint, DeviceMemory { other_states: 3, ..none }).expect("room"), 1630);
        let results = DeviceMemory { expert_bytes: 5000, ..none };
        assert_eq!(of(&footprint, results).expect("room"), 1160);
        let dense = ShardFootprint { experts: 0, ..footprint };
        assert_eq!(of(&dense, results).expect("room"), 1660, "it has no experts");
    }

    #[test]
    fn the_cache_holds_every_sequences_context_if_it_fits() {
        let footprint = footprint(1000, 10);
        assert_eq!(
            kv_cache_tokens(&footprint, 0, None, REQUEST, DeviceMemory::default()).expect("no limit"),
            4000
        );
        assert_eq!(
            kv_cache_tokens(&footprint, 0, set(1 << 20), REQUEST, DeviceMemory::default()).expect("room"),
            4000
        );
        // Nine tenths of 20,000 bytes are 18,000, minus 1000 for the weights.
        assert_eq!(
            kv_cache_tokens(&footprint, 0, set(20_000), REQUEST, DeviceMemory::default()).expect("less room"),
            1700
        );
    }

    #[test]
    fn two_servers_without_a_limit_fit_next_to_each_other() {
        let (gib, footprint) = (1u64 << 30, footprint(5 << 30, 128 << 10));
        let request = KvCacheRequest { sequences: 16, states: 16, context: 131_072, is_required: false };
        let available = Some(MemoryBudget { bytes: 23 * gib, is_set: false });
        let tokens =
            kv_cache_tokens(&footprint, 0, available, request, DeviceMemory::default()).expect("room");
        let server = footprint.weight_bytes + tokens * footprint.kv_bytes_per_token;
        assert!(2 * server < 23 * gib * 9 / 10 && tokens > 32_000, "{tokens} tokens, {server} bytes");
        let asked = KvCacheRequest { context: 65_536, is_required: true, ..request };
        let tokens = kv_cache_tokens(&footprint, 0, available, asked, DeviceMemory::default()).expect("room");
        assert_eq!(tokens, 65_536, "a context that was asked for may take more than a third");
    }

    #[test]
    fn a_plan_is_what_the_rank_with_the_least_room_can_hold() {
        let footprints = [footprint(1000, 10), footprint(1000, 40)];
        let plan = |asked| KvCacheSize::plan(&footprints, (memory(1 << 20), 1), Some(asked), REQUEST);
        // Each rank may use 13,500 of 30,000 bytes, and 12,500 of those for its cache: 312 tokens
        // of 40 bytes, in ten blocks of 32.
        assert_eq!(plan(30_000).expect("room").tokens, 320);
        assert!(matches!(plan(1 << 21), Err(PlanError::Spec(SpecError::Memory { .. }))));
        assert!(matches!(plan(2000), Err(PlanError::Model(ModelError::DoesNotFit { rank: 0, .. }))));
    }

    #[test]
    fn the_size_counts_all_ranks_and_states() {
        let footprints =
            [10, 30].map(|kv| ShardFootprint { state_bytes_per_sequence: 7, ..footprint(1, kv) });
        let size = KvCacheSize::new(&footprints, 320, REQUEST);
        assert_eq!(size, KvCacheSize { tokens: 320, bytes: 320 * 40 + 2 * 4 * 7, wanted: 4000 });
    }

    #[test]
    fn states_of_all_sequences_leave_less_for_tokens() {
        let footprint = ShardFootprint { state_bytes_per_sequence: 1000, ..footprint(1000, 10) };
        // Four sequences' states take 4000 of the 17,000 bytes next to the weights.
        assert_eq!(
            kv_cache_tokens(&footprint, 0, set(20_000), REQUEST, DeviceMemory::default()).expect("room"),
            1300
        );
        assert!(
            kv_cache_tokens(&footprint, 0, set(5_000), REQUEST, DeviceMemory::default()).is_err(),
            "the states do not fit"
        );
    }

    #[test]
    fn a_cache_that_is_too_small_is_an_error_that_says_what_is_needed() {
        let tokens = |budget, is_required| {
            let request = KvCacheRequest { is_required, ..REQUEST };
            kv_cache_tokens(&footprint(1000, 10), 3, set(budget), request, DeviceMemory::default())
        };
        // 256 tokens take 2560 bytes, 1000 tokens 10,000.
        assert_eq!(tokens(4000, false).expect("room for 256"), 260);
        for (budget, is_required, least) in [(3900, false, 256), (12_000, true, 1000)] {
            match tokens(budget, is_required) {
                Err(ModelError::DoesNotFit { rank: 3, weights: 1000, kv, tokens, usable, available }) => {
                    assert_eq!((kv, tokens, available), (10 * least as u64, least, budget));
                    assert!(usable == budget / 10 * 9 && 1000 + kv > usable, "{usable}");
                }
                other => panic!("{budget} bytes: {other:?}"),
            }
        }
        assert!(tokens(900, false).is_err(), "the weights alone do not fit");
    }

    /// Less than the memory is needed: only with the part that stays free does the sum make sense.
    #[test]
    fn the_error_names_the_part_of_the_memory_that_stays_free() {
        let gib = 1 << 30;
        let error = kv_cache_tokens(
            &footprint(350 * gib, 3 << 20),
            0,
            set(384 * gib),
            REQUEST,
            DeviceMemory::default(),
        );
        let text = error.expect_err("a tenth is reserved").to_string();
        let sum = "together 350.8 GiB, but may use 345.6 GiB of its 384.0 GiB: a tenth stays free";
        assert!(text.contains(sum), "{text}");
    }
}

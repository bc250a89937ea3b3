//! Steps that the device computes before the host requests them.

use std::ops::Range;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use thunder_collectives::{CommError, Group, Op, TransportChoice, local};
use thunder_compute::step::KV_BLOCK_TOKENS;
use thunder_compute::{
    Activations, Backend, CachePart, CacheShape, Choice, ChoiceScratch, Choices, ComputeError, Device,
    Encoding, Float, GatedConvSpec, KvFormat, Largest, LayerNorm, MatrixSource, RareOperations, Reference,
    Rope, Rounding, RowOrder, Step, Strided,
};

use super::{backend, device, devices, exchanging};
use crate::proof::Numbers;
use crate::sums::Sums;
use crate::{Buffer, Found, GpuBackend, Matrix, SumForm};

const VOCABULARY: usize = 50;
const WIDTH: usize = 64;

/// The token that follows another one.
fn after(token: u32) -> u32 {
    (7 * token + 3) % VOCABULARY as u32
}

/// A model of one product, in which the largest logit of a token is that of [`after`]. Each rank
/// has some rows of its matrices.
struct Chain {
    backend: GpuBackend,
    /// The rank's part of the vocabulary.
    own: Range<usize>,
    table: Matrix,
    head: Matrix,
    hidden: Buffer,
    logits: Buffer,
    /// What few families do to rows between the products: a LayerNorm, and gates of two heads.
    changes: Option<(LayerNorm, Buffer)>,
    /// The device has to record the step again before this operation.
    interrupted: Option<usize>,
    /// The logits after each token. They are whole numbers, so every device has the same.
    expected: Vec<Vec<f32>>,
}

fn matrix<B: Backend>(backend: &mut B, rows: &[Vec<f32>]) -> B::Matrix {
    let bytes: Vec<u8> = rows.iter().flatten().flat_map(|x| x.to_le_bytes()).collect();
    let source = MatrixSource {
        rows: rows.len(),
        cols: rows[0].len(),
        encoding: Encoding::Float(Float::F32),
        weight: Strided { bytes: &bytes, stride: 4 * rows[0].len(), row_bytes: 4 * rows[0].len() },
        scales: None,
        offsets: None,
        row_order: RowOrder::AsStored,
        first_row: 0,
        bias: None,
        pages: None,
    };
    backend.matrix(&[source]).unwrap()
}

impl Chain {
    /// A rank whose sums are exchanged within its steps, and that may compute steps ahead.
    fn of_rank(found: &Found, form: SumForm, group: Group) -> Self {
        let mut backend = exchanging(found, form, Activations::F32, group);
        backend.tune(WIDTH, 0).unwrap();
        Self::new(backend)
    }

    fn new(mut backend: GpuBackend) -> Self {
        let mut random = thunder_testing::Random::new(5);
        let mut row = |_| (0..WIDTH).map(|_| if random.below(2) == 0 { -1.0 } else { 1.0 }).collect();
        let rows: Vec<Vec<f32>> = (0..VOCABULARY).map(&mut row).collect();
        let mut head = rows.clone();
        for (token, row) in (0..).zip(&rows) {
            head[after(token) as usize].clone_from(row);
        }
        let product = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
        let after_row = |row: &Vec<f32>| head.iter().map(|of_head| product(row, of_head)).collect();
        let expected = rows.iter().map(after_row).collect();
        let (rank, ranks) = (backend.group().rank(), backend.group().size());
        // Not even.
        let own = VOCABULARY * rank * rank / (ranks * ranks)
            ..VOCABULARY * (rank + 1) * (rank + 1) / (ranks * ranks);
        let [table, head] = [rows, head].map(|rows| matrix(&mut backend, &rows[own.clone()]));
        let [hidden, logits] = [WIDTH, own.len()].map(|width| backend.buffer(8, width).unwrap());
        Self { backend, own, table, head, hidden, logits, changes: None, interrupted: None, expected }
    }

    /// Computes the logits after tokens at the same position.
    fn forward(&mut self, tokens: &[u32], position: usize) -> Result<(), ComputeError> {
        let mut step = Step::default();
        // The second block is allocated from the start, the third one when it is needed.
        let blocks = (position / KV_BLOCK_TOKENS + 1).max(2) as u32;
        for (slot, token) in tokens.iter().enumerate() {
            let own: Vec<u32> = (0..blocks).map(|block| 8 * block + slot as u32).collect();
            step.push(&[*token], position, &own, slot, true);
        }
        let rope = Rope { inverse_frequencies: vec![1.0, 0.5], amplitude: 1.0, interleaved: false };
        self.backend.begin(&step, &[rope])?;
        let first = self.own.start as u32;
        self.backend.embed(&self.table, &step.tokens, first, 1.0, &mut self.hidden)?;
        let rows = 0..tokens.len();
        for part in 0..2 {
            if self.interrupted == Some(part) {
                self.backend.device.cannot_repeat().unwrap();
            }
            if part == 0 {
                self.backend.all_reduce(&mut self.hidden, rows.clone())?;
            }
        }
        if let Some((norm, gates)) = &self.changes {
            let (backend, hidden) = (&mut self.backend, &mut self.hidden);
            backend.center(&[0..WIDTH], rows.clone(), hidden).unwrap();
            backend.layer_norm(norm, rows.clone(), hidden).unwrap();
            backend.gate_heads(gates, (0, WIDTH / 2), rows.clone(), hidden).unwrap();
            backend.round(Rounding::E4m3, rows.clone(), hidden).unwrap();
            backend.clear(rows.clone(), &mut self.logits).unwrap();
        }
        self.backend.product(&self.hidden, rows, &self.head, &mut self.logits)
    }

    /// A step of tokens at the same position. Returns the tokens that follow.
    fn step(&mut self, tokens: &[u32], position: usize) -> Vec<u32> {
        self.try_step(tokens, position).unwrap()
    }

    fn try_step(&mut self, tokens: &[u32], position: usize) -> Result<Vec<u32>, ComputeError> {
        self.forward(tokens, position)?;
        let mut largest = vec![Largest::NONE; tokens.len()];
        self.backend.read_largest(&self.logits, &mut largest)?;
        let mut all = vec![0.0; 2 * largest.len() * self.backend.group().size()];
        let first = 2 * largest.len() * self.backend.group().rank();
        for (largest, to) in largest.iter().zip(all[first..].as_chunks_mut::<2>().0) {
            *to = [(largest.column + self.own.start as u32) as f32, largest.value];
        }
        self.backend.group().all_reduce(&mut all, Op::Sum)?;
        let of_row = |row: usize| {
            let of_ranks = all.as_chunks::<2>().0.chunks_exact(largest.len()).map(|of_rank| of_rank[row]);
            of_ranks
                .map(|[column, value]| Largest { column: column as u32, value })
                .reduce(Largest::or)
                .unwrap()
        };
        let largest: Vec<Largest> = (0..largest.len()).map(of_row).collect();
        let is_whole = |largest: &Largest| largest.value == WIDTH as f32;
        assert!(self.changes.is_some() || largest.iter().all(is_whole), "{largest:?}");
        Ok(largest.iter().map(|largest| largest.column).collect())
    }

    /// The same with chosen tokens. Checks them.
    fn choose(&mut self, tokens: &[u32], position: usize, choices: Choices<'_>) -> Vec<u32> {
        self.forward(tokens, position).unwrap();
        let mut chosen = vec![Largest::NONE; tokens.len()];
        let mut likely = vec![0.0; tokens.len() * choices.likely_words()];
        self.backend.read_chosen(&self.logits, &choices, &mut chosen, &mut likely).unwrap();
        let mut scratch = ChoiceScratch::default();
        let words = choices.likely_words();
        for (index, (chosen, token)) in chosen.iter().zip(tokens).enumerate() {
            let mut reported = vec![0.0; words];
            let row = &self.expected[*token as usize];
            let expected = choices.of_row(index, row, &mut scratch, &mut reported);
            assert_eq!(*chosen, expected, "row {index} at {position}");
            let found = &likely[index * words..][..words];
            let is_near = |(a, b): (&f32, &f32)| a.to_bits() == b.to_bits() || (a - b).abs() < 1e-3;
            assert!(found.iter().zip(&reported).all(is_near), "{found:?}, {reported:?}");
        }
        chosen.iter().map(|chosen| chosen.column).collect()
    }

    fn followed(&self) -> usize {
        self.backend.device.followed
    }
}

fn all_after(tokens: &[u32]) -> Vec<u32> {
    tokens.iter().map(|token| after(*token)).collect()
}

#[test]
fn steps_that_were_foreseen_are_computed_ahead_and_others_again() {
    let test = "steps_that_were_foreseen_are_computed_ahead_and_others_again";
    let Some(found) = device(test) else { return };
    let mut chain = Chain::new(backend(&found, Activations::F32, Group::solo()));
    let mut tokens = vec![1, 20];
    let mut position = 0;
    let mut next = |chain: &mut Chain, tokens: &mut Vec<u32>, steps: usize| {
        for _ in 0..steps {
            let found = chain.step(tokens, position);
            assert_eq!(found, all_after(tokens), "at {position}");
            *tokens = found;
            position += 1;
        }
    };
    next(&mut chain, &mut tokens, 4);
    assert_eq!(chain.followed(), 1, "the fourth step was the third that was foreseen");
    next(&mut chain, &mut tokens, 16);
    assert_eq!(chain.followed(), 17);
    // Other tokens than the ones that were found.
    tokens = vec![30, 31];
    next(&mut chain, &mut tokens, 1);
    assert_eq!(chain.followed(), 17, "it takes more steps after one in vain");
    next(&mut chain, &mut tokens, 12);
    assert!(chain.followed() > 20, "{}", chain.followed());
    // Another sequence joins, and two leave.
    tokens.push(44);
    next(&mut chain, &mut tokens, 20);
    tokens.drain(..2);
    let before = chain.followed();
    // Past the end of the second block, and of later ones.
    next(&mut chain, &mut tokens, 100);
    assert!(chain.followed() > before + 80, "{} after {before}", chain.followed());
    // The results of a step can still be read, although the device has computed another step.
    let (followed, last) = (chain.followed(), tokens[0]);
    next(&mut chain, &mut tokens, 1);
    assert_eq!(chain.followed(), followed + 1);
    let mut logits = vec![0.0; VOCABULARY];
    chain.backend.read(&chain.logits, 0..1, &mut logits).unwrap();
    assert_eq!(Largest::of(&logits), Largest { column: after(last), value: WIDTH as f32 });
    next(&mut chain, &mut tokens, 2);
}

#[test]
fn ranks_that_relay_sums_compute_steps_ahead_only_together() {
    compute_ahead_together("ranks_that_relay_sums_compute_steps_ahead_only_together", SumForm::Relay);
}

#[test]
fn ranks_with_mailboxes_compute_steps_ahead_only_together() {
    compute_ahead_together("ranks_with_mailboxes_compute_steps_ahead_only_together", SumForm::Mailbox);
}

fn compute_ahead_together(test: &str, form: SumForm) {
    let Some(devices) = devices(test, 2) else { return };
    let meeting = Barrier::new(2);
    let followed = local::run(2, TransportChoice::Shm, |group| {
        let rank = group.rank();
        let mut chain = Chain::of_rank(&devices[rank], form, group);
        let (mut tokens, mut position) = (vec![1, 20], 0);
        let mut next = |chain: &mut Chain, tokens: &mut Vec<u32>, steps: usize| {
            let before = chain.followed();
            for _ in 0..steps {
                let found = chain.step(tokens, position);
                assert_eq!(found, all_after(tokens), "rank {rank} at {position}");
                *tokens = found;
                position += 1;
            }
            chain.followed() - before
        };
        let mut counts = vec![next(&mut chain, &mut tokens, 20)];
        // Other tokens than the ones that were found.
        tokens = vec![30, 31];
        counts.push(next(&mut chain, &mut tokens, 20));
        // Another sequence joins, and two leave.
        tokens.push(44);
        counts.push(next(&mut chain, &mut tokens, 20));
        tokens.drain(..2);
        // Past the end of a block.
        counts.push(next(&mut chain, &mut tokens, 40));
        // Something that a rank may leave out follows a step.
        chain.backend.take_back_ahead().unwrap();
        if rank == 0 {
            chain.backend.read(&chain.logits, 0..1, &mut vec![0.0; chain.own.len()]).unwrap();
        }
        meeting.wait();
        counts.push(next(&mut chain, &mut tokens, 30));
        // One rank alone has to record a step again.
        for part in 0..2 {
            chain.interrupted = (rank == 1).then_some(part);
            counts.push(next(&mut chain, &mut tokens, 1));
            chain.interrupted = None;
            counts.push(next(&mut chain, &mut tokens, 30));
        }
        chain.backend.group().barrier().unwrap();
        counts
    });
    let followed = followed.unwrap();
    assert_eq!(followed[0], followed[1]);
    let fewest = [14, 10, 10, 25, 15, 0, 20, 0, 20];
    assert!(followed[0].iter().zip(fewest).all(|(count, fewest)| *count >= fewest), "{followed:?}");
}

#[test]
fn a_rank_that_leaves_ends_steps_that_devices_compute_ahead() {
    let test = "a_rank_that_leaves_ends_steps_that_devices_compute_ahead";
    let Some(devices) = devices(test, 2) else { return };
    for form in [SumForm::Relay, SumForm::Mailbox] {
        leave(&devices, form);
    }
}

fn leave(devices: &[Found], form: SumForm) {
    local::run(2, TransportChoice::Shm, |group| {
        let rank = group.rank();
        let mut chain = Chain::of_rank(&devices[rank], form, group);
        let mut tokens = vec![1, 20];
        for position in 0..12 {
            tokens = chain.step(&tokens, position);
        }
        assert!(chain.followed() > 6, "{}", chain.followed());
        if rank == 1 {
            // Its device has the next step.
            return;
        }
        let began = Instant::now();
        let error = (12..14).find_map(|position| chain.try_step(&tokens, position).err());
        let is_loss = matches!(error, Some(ComputeError::Comm(CommError::PeerLost { rank: 1, .. })));
        assert!(is_loss, "{error:?}");
        // The device's own limit is 1.8 s, and several times as much in software.
        let limit = Duration::from_millis(if devices[rank].info.is_real() { 1500 } else { 5000 });
        assert!(began.elapsed() < limit, "the device waited until its own limit");
        // The device works alone.
        chain.backend.sums = Sums::new(Group::solo());
        let logits = Chain::new(chain.backend).step(&[1], 0);
        assert_eq!(logits, all_after(&[1]));
    })
    .unwrap();
}

#[test]
fn a_rank_that_does_not_vote_ends_the_step() {
    let test = "a_rank_that_does_not_vote_ends_the_step";
    let Some(devices) = devices(test, 2) else { return };
    for (form, words) in
        [(SumForm::Relay, "did not come to the end of a step"), (SumForm::Mailbox, "stalled")]
    {
        local::run(2, TransportChoice::Shm, |group| {
            let rank = group.rank();
            let mut chain = Chain::of_rank(&devices[rank], form, group);
            if rank == 1 {
                // It computes its part, and looks for no token.
                chain.forward(&[1], 0).unwrap();
                chain.backend.read(&chain.logits, 0..1, &mut vec![0.0; chain.own.len()]).unwrap();
                return std::thread::sleep(Duration::from_secs(2));
            }
            let limit = Duration::from_millis(500);
            chain.backend.sums.longest_vote = limit;
            chain.backend.sums.relay.iter_mut().for_each(|relay| relay.longest_vote = limit);
            let began = Instant::now();
            let error = chain.try_step(&[1], 0).unwrap_err().to_string();
            assert!(error.contains("rank 1") && error.contains(words), "{form:?}: {error}");
            assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
        })
        .unwrap();
    }
}

#[test]
fn a_step_with_layer_norms_and_gates_of_heads_is_one_submission() {
    let test = "a_step_with_layer_norms_and_gates_of_heads_is_one_submission";
    let Some(found) = device(test) else { return };
    let mut backend = backend(&found, Activations::F32, Group::solo());
    let norm = LayerNorm { weight: vec![1.0; WIDTH], bias: vec![0.0; WIDTH], eps: 1e-5 };
    let mut gates = backend.buffer(8, 2).unwrap();
    backend.write(&[0.0, 1.0].repeat(8), &mut gates).unwrap();
    let mut chain = Chain::new(backend);
    chain.changes = Some((norm, gates));
    let mut tokens = vec![1, 20, 33];
    for position in 0..24 {
        let followed = chain.followed();
        let next = chain.step(&tokens, position);
        assert_eq!(next, all_after(&tokens), "at {position}");
        tokens = next;
        let submitted_now = (chain.followed() - followed, chain.backend.device.submissions);
        match position {
            // Kernels are proved.
            0 => {}
            1..3 => assert_eq!(submitted_now, (0, 1), "at {position}"),
            // The next step is submitted too.
            3 => assert_eq!(submitted_now, (1, 1)),
            // The step was submitted before.
            _ => assert_eq!(submitted_now, (1, 0), "at {position}"),
        }
    }
}

#[test]
fn steps_of_chosen_tokens_are_computed_ahead_if_their_draws_are_known() {
    let test = "steps_of_chosen_tokens_are_computed_ahead_if_their_draws_are_known";
    let Some(found) = device(test) else { return };
    let mut chain = Chain::new(backend(&found, Activations::F32, Group::solo()));
    let mut random = thunder_testing::Random::new(3);
    let mut draw = || random.below(1 << 32) as u32;
    let warm = Choice { temperature: 30.0, top_k: 30, top_p: 0.9, ..Choice::LARGEST };
    let kinds = [warm, Choice { temperature: 12.0, min_p: 0.01, ..Choice::LARGEST }, Choice::LARGEST];
    let (mut tokens, mut draws) = (vec![1, 20, 30], [draw(), draw(), draw()]);
    let mut unexpected = 0;
    for position in 0..120 {
        let choices: Vec<Choice> =
            kinds.iter().zip(draws).map(|(kind, draw)| Choice { draw, ..*kind }).collect();
        let next = [draw(), draw(), draw()];
        let next_draws: &[u32] = if position < 20 { &[] } else { &next };
        let cap = (position < 70).then_some(40.0);
        let likely = (position >= 70).then_some(3);
        let choices = Choices { cap, edits: &[], rows: &choices, next_draws, likely };
        tokens = chain.choose(&tokens, position, choices);
        draws = next;
        if position == 20 {
            assert_eq!(chain.followed(), 0, "no draws were known");
        }
        if position == 50 {
            assert!(chain.followed() > 20, "{}", chain.followed());
            // Another draw than the one that was announced.
            draws[1] = draw();
            unexpected = chain.followed();
        }
    }
    assert!(chain.followed() > unexpected + 40, "{} after {unexpected}", chain.followed());
}

/// A model whose logits depend on all tokens of the last ones: of a convolution's state.
struct Stateful<B: Backend> {
    backend: B,
    table: B::Matrix,
    head: B::Matrix,
    conv: GatedConvSpec<B::Vector>,
    caches: B::Caches,
    hidden: B::Buffer,
    convolved: B::Buffer,
    logits: B::Buffer,
}

impl<B: Backend> Stateful<B> {
    fn new(mut backend: B) -> Self {
        let channels = 64;
        let mut numbers = Numbers(8);
        let mut rows = |width: usize| (0..VOCABULARY).map(|_| numbers.take(width)).collect::<Vec<_>>();
        let (table, head) = (rows(3 * channels), rows(channels));
        let (table, head) = (matrix(&mut backend, &table), matrix(&mut backend, &head));
        let conv = GatedConvSpec { channels, kernel: 4, taps: numbers.take(4 * channels) };
        let conv = conv.try_map(&mut |values| backend.vector(&values)).unwrap();
        let kinds = vec![conv.cache()];
        let shape = CacheShape { caches: kinds, blocks: 1, slots: SLOTS, format: KvFormat::F16 };
        let caches = backend.caches(&shape).unwrap();
        let [hidden, convolved, logits] =
            [3 * channels, channels, VOCABULARY].map(|width| backend.buffer(8, width).unwrap());
        Self { backend, table, head, conv, caches, hidden, convolved, logits }
    }

    /// A step of sequences: slot, position, token. Returns the tokens that follow.
    fn step(&mut self, sequences: &[(usize, usize, u32)]) -> Vec<u32> {
        let mut step = Step::default();
        for (slot, position, token) in sequences {
            step.push(&[*token], *position, &[0, 0, 0, 0, 0, 0, 0, 0], *slot, true);
        }
        let all = 0..sequences.len();
        let Self { backend, table, head, conv, caches, hidden, convolved, logits } = self;
        backend.begin(&step, &[]).unwrap();
        backend.embed(table, &step.tokens, 0, 1.0, hidden).unwrap();
        backend.gated_conv(conv, &step, all.clone(), hidden, (caches, 0), convolved).unwrap();
        backend.product(convolved, all.clone(), head, logits).unwrap();
        let mut largest = vec![Largest::NONE; all.len()];
        backend.read_largest(logits, &mut largest).unwrap();
        largest.iter().map(|largest| largest.column).collect()
    }

    /// A slot's state, which is written to another slot, whose state is copied to a third.
    fn move_state(&mut self, [from, through, to]: [usize; 3]) -> Vec<u8> {
        let mut bytes = Vec::new();
        self.backend.read_cache(&mut self.caches, CachePart::Slot(from), &mut bytes).unwrap();
        assert!(self.backend.write_cache(&mut self.caches, CachePart::Slot(through), &bytes).unwrap());
        self.backend.copy_slot(&mut self.caches, through, to).unwrap();
        bytes
    }
}

const SLOTS: usize = 5;

#[test]
fn steps_with_states_are_computed_ahead_and_none_in_vain_changes_a_state() {
    let test = "steps_with_states_are_computed_ahead_and_none_in_vain_changes_a_state";
    let Some(found) = device(test) else { return };
    let mut model = Stateful::new(backend(&found, Activations::F32, Group::solo()));
    let mut reference = Stateful::new(Reference::new(Group::solo()));
    let mut random = thunder_testing::Random::new(6);
    // Of each slot: position and token.
    let mut slots = [(0, 1); SLOTS];
    let mut followed_of = [0; 4];
    for round in 0..60 {
        let count = [1, 2, 1, 3][round % 4];
        let first = random.below(SLOTS as u64) as usize;
        let before = model.backend.device.followed;
        for _ in 0..5 + random.below(12) {
            let of_step: Vec<usize> = (0..count).map(|index| (first + index) % SLOTS).collect();
            let sequences: Vec<_> =
                of_step.iter().map(|slot| (*slot, slots[*slot].0, slots[*slot].1)).collect();
            let found = model.step(&sequences);
            assert_eq!(found, reference.step(&sequences), "round {round}");
            for (slot, token) in of_step.iter().zip(&found) {
                slots[*slot] = (slots[*slot].0 + 1, *token);
            }
        }
        followed_of[count] += model.backend.device.followed - before;
        match random.below(4) {
            // Another token than the one that was found.
            0 => slots[first].1 = random.below(VOCABULARY as u64) as u32,
            1 => slots[first] = (0, 2),
            2 => {
                let places = [first, (first + 1) % SLOTS, (first + 3) % SLOTS];
                assert_eq!(model.move_state(places), reference.move_state(places));
                places[1..].iter().for_each(|slot| slots[*slot] = slots[first]);
            }
            _ => {}
        }
    }
    assert!(followed_of[1] > 50 && followed_of[2] > 20, "{followed_of:?}");
    assert_eq!(followed_of[3], 0, "three states have no second place");
}

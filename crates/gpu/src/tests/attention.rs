//! Attention on the device: a row's results depend only on its own sequence.

use thunder_collectives::Group;
use thunder_compute::step::KV_BLOCK_TOKENS;
use thunder_compute::{
    Activations, AttentionSpec, Backend, CacheShape, ComputeError, Device, KvFormat, QkNorm, Rope, Step,
};

use super::{backend, device};
use crate::GpuBackend;
use crate::kernel::Kernel;
use crate::proof::{Family, Numbers};

const KV_HEADS: usize = 2;
const QUERIES: usize = 4;
const DIM: usize = 64;
const SLOT_BLOCKS: usize = 12;

/// Attention of the first `kv_heads` KV heads, with some of the queries of each.
struct Attention {
    spec: AttentionSpec<crate::Vector>,
    queries: usize,
}

impl Attention {
    fn new(queries: usize, window: Option<usize>) -> Self {
        let queries_of = (0..KV_HEADS).map(|kv| kv * queries..(kv + 1) * queries).collect();
        let spec = AttentionSpec {
            key_dim: DIM,
            value_dim: DIM,
            queries_of,
            scale: 0.15,
            window,
            qk_norm: None,
            rope: None,
            sinks: None,
            temperature: None,
            out_column: 0,
        };
        Self { spec, queries }
    }

    /// Numbers of a row, determined by slot and position, for the available queries.
    fn row(&self, slot: usize, position: usize) -> Vec<f32> {
        let all = Numbers((slot * 1000 + position) as u64 * 77 + 5).take((KV_HEADS * (QUERIES + 2)) * DIM);
        let (queries, keys_values) = all.split_at(KV_HEADS * QUERIES * DIM);
        let mine = queries.chunks(QUERIES * DIM).flat_map(|head| &head[..self.queries * DIM]);
        mine.chain(keys_values).copied().collect()
    }

    /// Results of steps. Each step consists of pieces: slot, first position, tokens, whether it is
    /// a prompt.
    fn run(
        &self,
        backend: &mut GpuBackend,
        format: KvFormat,
        steps: &[Vec<(usize, usize, usize)>],
    ) -> Vec<((usize, usize), Vec<f32>)> {
        let shape = CacheShape { format, caches: vec![self.spec.cache()], blocks: 3 * SLOT_BLOCKS, slots: 3 };
        let mut caches = backend.caches(&shape).unwrap();
        let (width, outputs) = (self.spec.qkv_width(), KV_HEADS * self.queries * DIM);
        let mut results = Vec::new();
        for pieces in steps {
            let (mut step, mut values, mut places) = (Step::default(), Vec::new(), Vec::new());
            for &(slot, start, tokens) in pieces {
                let blocks = (start + tokens).div_ceil(KV_BLOCK_TOKENS);
                let blocks: Vec<u32> =
                    (0..blocks).map(|block| (slot + 3 * (SLOT_BLOCKS - 1 - block)) as u32).collect();
                step.push(&vec![0; tokens], start, &blocks, slot, false);
                for position in start..start + tokens {
                    values.extend(self.row(slot, position));
                    places.push((slot, position));
                }
            }
            let rows = step.rows();
            let (mut qkv, mut out) =
                (backend.buffer(rows, width).unwrap(), backend.buffer(rows, outputs).unwrap());
            backend.write(&values, &mut qkv).unwrap();
            backend.begin(&step, &[]).unwrap();
            backend.attention(&self.spec, &step, 0..rows, &mut qkv, (&mut caches, 0), &mut out).unwrap();
            let mut found = vec![0.0; rows * outputs];
            backend.read(&out, 0..rows, &mut found).unwrap();
            results.extend(places.into_iter().zip(found.chunks(outputs).map(<[f32]>::to_vec)));
        }
        results.sort_by_key(|(place, _)| *place);
        results
    }
}

#[test]
fn a_row_attends_alike_alone_and_among_others() {
    let Some(found) = device("a_row_attends_alike_alone_and_among_others") else { return };
    let mut backend = backend(&found, Activations::F32, Group::solo());
    for (window, format) in [(None, KvFormat::F16), (Some(45), KvFormat::Int8)] {
        let attention = Attention::new(QUERIES, window);
        // Whole prompts together, then tokens of all.
        let together = [
            vec![(0, 0, 150), (1, 0, 33), (2, 0, 300)],
            vec![(0, 150, 1), (1, 33, 1), (2, 300, 1)],
            vec![(0, 151, 1), (1, 34, 20)],
        ];
        // Prompts in pieces, each alone.
        let alone = [
            vec![(2, 0, 20)],
            vec![(2, 20, 131), (0, 0, 64)],
            vec![(2, 151, 149)],
            vec![(2, 300, 1)],
            vec![(0, 64, 86), (1, 0, 3)],
            vec![(0, 150, 1)],
            vec![(0, 151, 1), (1, 3, 30)],
            vec![(1, 33, 1)],
            vec![(1, 34, 20)],
        ];
        // One workgroup computes all splits of a row's heads.
        backend.busy_groups = 1;
        let chained = attention.run(&mut backend, format, &together);
        backend.busy_groups = 512;
        let together = attention.run(&mut backend, format, &together);
        assert_eq!(chained, together);
        let alone = attention.run(&mut backend, format, &alone);
        assert_eq!(together.len(), alone.len());
        for ((place, together), (_, alone)) in together.iter().zip(&alone) {
            assert!(together.iter().any(|x| *x != 0.0), "{place:?}");
            assert_eq!(together, alone, "{place:?}, window {window:?}, {format:?}");
        }
    }
    assert!(backend.refusals().is_empty(), "{:?}", backend.refusals());
    let taken: Vec<_> = backend.taken.keys().collect();
    let of = |many: bool| taken.iter().any(|family| matches!(family, Family::Many(_)) == many);
    assert!(of(true) && of(false), "{taken:?}");
}

#[test]
fn wrong_attention_of_many_heads_is_refused_and_that_of_one_taken() {
    let test = "wrong_attention_of_many_heads_is_refused_and_that_of_one_taken";
    let Some(found) = device(test) else { return };
    let steps = [vec![(0, 0, 70)], vec![(0, 70, 1)]];
    let attention = Attention::new(QUERIES, None);
    let right = attention.run(&mut backend(&found, Activations::F32, Group::solo()), KvFormat::F16, &steps);
    let mut wrong = backend(&found, Activations::F32, Group::solo());
    wrong.device.sabotage = Some(|kernel, text| match kernel {
        Kernel::AttendMany(_) => text.replace("total0 = fma(total0, shrink, ", "total0 = fma(0.5, shrink, "),
        Kernel::AttendTiles(_) => text.replace("total = fma(total, shrink, sum)", "total = sum"),
        _ => text,
    });
    let found = attention.run(&mut wrong, KvFormat::F16, &steps);
    for name in ["whole: true", "whole: false", "Tiles"] {
        assert!(wrong.refusals().iter().any(|refused| refused.contains(name)), "{:?}", wrong.refusals());
    }
    are_near(&right, &found);
}

#[test]
fn attention_of_prompts_counts_as_work_of_a_submission() {
    let Some(found) = device("attention_of_prompts_counts_as_work_of_a_submission") else { return };
    let mut backend = backend(&found, Activations::F32, Group::solo());
    let attention = Attention::new(QUERIES, None);
    let mut run = |steps: &[Vec<(usize, usize, usize)>]| {
        backend.device.work = 0.0;
        attention.run(&mut backend, KvFormat::F16, steps);
        backend.device.work
    };
    let prompt = vec![(0, 0, 150)];
    // Kernels are proved meanwhile.
    run(&[prompt.clone(), vec![(0, 150, 1)]]);
    let work = run(std::slice::from_ref(&prompt));
    assert!(work > 0.0);
    assert!(run(&[vec![(0, 0, 300)]]) > 2.0 * work);
    assert_eq!(run(&[prompt, vec![(0, 150, 1)]]), work, "generated tokens do not count");
}

type Results = [((usize, usize), Vec<f32>)];

fn are_near(right: &Results, found: &Results) {
    assert_eq!(right.len(), found.len());
    for ((place, right), (_, found)) in right.iter().zip(found) {
        let most = right.iter().zip(found).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(most < 1e-4, "{place:?}: off by {most}");
    }
}

#[test]
fn splits_that_a_kernel_adds_wrongly_are_added_by_another() {
    let Some(found) = device("splits_that_a_kernel_adds_wrongly_are_added_by_another") else { return };
    let steps = [vec![(0, 0, 150)], vec![(0, 150, 1)]];
    let attention = Attention::new(QUERIES, None);
    let right = attention.run(&mut backend(&found, Activations::F32, Group::solo()), KvFormat::F16, &steps);
    let mut wrong = backend(&found, Activations::F32, Group::solo());
    // The second split uses the tokens of the first.
    wrong.device.sabotage = Some(|_, text| text.replace("let split1 = min(", "let split1 = 0u * min("));
    let found = attention.run(&mut wrong, KvFormat::F16, &steps);
    are_near(&right, &found);
    let refused = wrong.refusals();
    assert!(refused.len() == 1 && refused[0].contains("whole: true"), "{refused:?}");
    assert!(
        wrong
            .taken
            .iter()
            .any(|(family, right)| matches!(family, Family::Many(form) if !form.whole && *right))
    );
}

#[test]
fn a_generated_token_takes_one_kernel_and_leaves_the_bits_of_several() {
    let Some(found) = device("a_generated_token_takes_one_kernel_and_leaves_the_bits_of_several") else {
        return;
    };
    for all in [false, true] {
        let mut backend = backend(&found, Activations::F32, Group::solo());
        let mut run = |apart: bool| {
            let mut numbers = Numbers(5);
            let spec = AttentionSpec {
                qk_norm: all.then(|| QkNorm { query: numbers.take(DIM), key: numbers.take(DIM), eps: 1e-5 }),
                rope: Some(0),
                temperature: all.then_some((0.3, 8)),
                ..Attention::new(QUERIES, None)
                    .spec
                    .try_map(&mut |_| Ok::<_, ComputeError>(Vec::new()))
                    .unwrap()
            };
            let spec = spec.try_map(&mut |values| backend.vector(&values)).unwrap();
            let shape = CacheShape {
                format: KvFormat::F16,
                caches: vec![spec.cache()],
                blocks: SLOT_BLOCKS,
                slots: 1,
            };
            let mut caches = backend.caches(&shape).unwrap();
            let (width, outputs) = (spec.qkv_width(), spec.heads() * DIM);
            let rope = Rope {
                inverse_frequencies: (1..DIM / 2).map(|i| 1.0 / i as f32).collect(),
                amplitude: 1.1,
                interleaved: all,
            };
            let (mut results, mut kernels) = (Vec::new(), Vec::new());
            for position in 0..71 {
                let mut step = Step::default();
                step.push(&[0], position, &[2, 0, 1][..position / KV_BLOCK_TOKENS + 1], 0, false);
                let mut qkv = backend.buffer(1, width).unwrap();
                let mut out = backend.buffer(1, outputs).unwrap();
                backend.write(&numbers.take(width), &mut qkv).unwrap();
                backend.begin(&step, std::slice::from_ref(&rope)).unwrap();
                let before = backend.device.recorded;
                if apart {
                    backend.prepare_and_append(&spec, 0..1, &qkv, (&caches, 0)).unwrap();
                    backend.attend(&spec, &step, 0..1, &qkv, (&mut caches, 0), &mut out).unwrap();
                } else {
                    backend.attention(&spec, &step, 0..1, &mut qkv, (&mut caches, 0), &mut out).unwrap();
                }
                kernels.push(backend.device.recorded - before);
                let mut found = vec![0.0; outputs];
                backend.read(&out, 0..1, &mut found).unwrap();
                results.push(found);
            }
            // The first run proves the forms.
            (results, kernels[kernels.len() - 1])
        };
        let (apart, two) = run(true);
        let (whole, one) = run(false);
        assert_eq!((two, one), (2, 1), "with all: {all}");
        for (position, (apart, whole)) in apart.iter().zip(&whole).enumerate() {
            assert!(apart.iter().any(|x| *x != 0.0));
            if all && found.info.is_real() {
                // Drivers may round norms differently in another kernel, as seen on an H100.
                let most = apart.iter().zip(whole).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                assert!(most < 1e-3, "at {position}: off by {most}");
            } else {
                assert_eq!(apart, whole, "at {position}, with all: {all}");
            }
        }
        assert!(backend.refusals().is_empty(), "{:?}", backend.refusals());
    }
}

#[test]
fn a_head_attends_alike_whatever_the_rank_has() {
    let Some(found) = device("a_head_attends_alike_whatever_the_rank_has") else { return };
    let mut backend = backend(&found, Activations::F32, Group::solo());
    let steps = [vec![(0, 0, 150)], vec![(0, 150, 1)]];
    let all = Attention::new(QUERIES, None).run(&mut backend, KvFormat::F16, &steps);
    for queries in [1, 2, 3] {
        let some = Attention::new(queries, None).run(&mut backend, KvFormat::F16, &steps);
        for ((place, all), (_, some)) in all.iter().zip(&some) {
            let of_all = all.chunks(QUERIES * DIM).flat_map(|head| &head[..queries * DIM]);
            assert!(of_all.eq(some), "{queries} queries of a KV head, {place:?}");
        }
    }
}

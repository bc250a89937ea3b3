//! Measures the time of sums over ranks, in mailboxes and by the host, on a real GPU:
//! `THUNDER_TEST_GPU=0 cargo nextest run --release -p thunder-gpu --run-ignored only --no-capture
//! latency`.

use std::time::Instant;

use thunder_collectives::{Op, TransportChoice, local};
use thunder_compute::{
    Activations, Backend, Device as _, Encoding, Float, Largest, LinearInput, MatrixSource, Norm, RowOrder,
    Strided,
};

use super::device;
use crate::{GpuBackend, GpuConfig, Mailboxes};

/// Exchanges of a submission: the sums of a token with 32 layers.
const SUMS: usize = 64;
const SUBMISSIONS: usize = 60;
const HIDDEN: usize = 4096;

fn median_and_p99(mut us: Vec<f64>) -> String {
    us.sort_by(f64::total_cmp);
    let at = |share: f64| us[((us.len() - 1) as f64 * share) as usize];
    format!("median {:.1} us, p99 {:.1} us", at(0.5), at(0.99))
}

#[test]
#[ignore = "a measurement"]
fn latency_of_exchanges() {
    let Some(found) = device("latency_of_exchanges") else { return };
    for time in crate::exchange_times(&found, &[1, 8, 16, 32, 64, 256]).unwrap().unwrap() {
        println!("{time:?}");
    }
}

/// A 4-bit matrix of random levels.
fn matrix(backend: &mut GpuBackend) -> crate::Matrix {
    let levels = thunder_testing::Random::new(1).bytes(HIDDEN * HIDDEN / 2);
    let halves = |value: f32| half::f16::from_f32(value).to_le_bytes().repeat(HIDDEN * HIDDEN / 64);
    let (scales, offsets) = (halves(0.001), halves(-0.0075));
    let view = |bytes| Strided { bytes, stride: bytes.len() / HIDDEN, row_bytes: bytes.len() / HIDDEN };
    let source = MatrixSource {
        rows: HIDDEN,
        cols: HIDDEN,
        encoding: Encoding::Affine { bits: 4, group: 64, scales: Float::F16 },
        weight: view(&levels),
        scales: Some(view(&scales)),
        offsets: Some(view(&offsets)),
        row_order: RowOrder::AsStored,
        first_row: 0,
        bias: None,
        pages: None,
    };
    backend.matrix(&[source]).unwrap()
}

/// A GPU rank computes a token as 64 products of 4096 x 4096 with a sum each; its peer only sums.
#[test]
#[ignore = "a measurement"]
fn latency_of_tokens() {
    let Some(found) = device("latency_of_tokens") else { return };
    for mailboxes in [Mailboxes::Never, Mailboxes::Always, Mailboxes::Never, Mailboxes::Always] {
        local::run(2, TransportChoice::Shm, |mut group| {
            if group.rank() == 1 {
                for _ in 0..SUBMISSIONS * SUMS {
                    group.all_reduce(&mut vec![0.0f32; HIDDEN], Op::Sum).unwrap();
                }
                return;
            }
            let config = GpuConfig { activations: Activations::Auto, mailboxes, ..GpuConfig::default() };
            let mut backend = GpuBackend::new(&found, config, group).unwrap();
            assert_eq!(backend.has_mailbox(), mailboxes == Mailboxes::Always);
            let w = matrix(&mut backend);
            let norm = Norm { weight: backend.vector(&[1.0; HIDDEN]).unwrap(), eps: 1e-5 };
            let [mut residual, mut normed] = [(); 2].map(|()| backend.buffer(1, HIDDEN).unwrap());
            let mut us = Vec::new();
            for _ in 0..SUBMISSIONS {
                backend.write(&[1.0; HIDDEN], &mut residual).unwrap();
                let began = Instant::now();
                for _ in 0..SUMS {
                    backend.rms_norm(&residual, 0..1, &norm, &mut normed).unwrap();
                    backend.linear_reduce_add(LinearInput::Plain(&normed), 0..1, &w, &mut residual).unwrap();
                }
                let mut largest = [Largest::NONE];
                backend.read_largest(&residual, &mut largest).unwrap();
                assert!(largest[0].value.is_finite());
                us.push(began.elapsed().as_secs_f64() * 1e6);
            }
            us.drain(..SUBMISSIONS / 2);
            println!("a token of {SUMS} sums of 16 KiB, mailboxes {mailboxes:?}: {}", median_and_p99(us));
        })
        .unwrap();
    }
}

//! Changes of rows that few families need.

use super::data::{columns, filled};
use super::{Suite, Work};
use crate::backend::{Backend, ComputeError, Curve, LayerNorm, Rounding};

/// Changes of rows in place, of all rows and of some.
struct Changes<'a> {
    x: &'a [f32],
    width: usize,
}

impl Work for Changes<'_> {
    fn run<B: Backend>(&self, backend: &mut B) -> Result<Vec<f32>, ComputeError> {
        let (count, width) = (self.x.len() / self.width, self.width);
        let some = count / 2..count;
        let mut x = filled(backend, self.x, width)?;
        backend.center(&[0..3, 5..width], some.clone(), &mut x)?;
        backend.shift(2, &[0.5, -1.5, 3.0], 0..count, &mut x)?;
        let factors: Vec<f32> = some.clone().map(|row| 1.0 + row as f32).collect();
        backend.scale(1..width - 1, &factors, some.clone(), &mut x)?;
        let mut out = backend.buffer(count, width + 4)?;
        backend.copy_columns((&x, 3), 0..count, (&mut out, 0..width - 3))?;
        backend.copy_columns((&x, 1), some.clone(), (&mut out, width..width + 4))?;
        backend.bend(Curve::SquaredRelu, some, &mut out)?;
        let mut results = columns(backend, &x, 0..count, (width, width))?;
        let copied = columns(backend, &out, 0..count, (width + 4, width + 4))?;
        // Columns that were not written have arbitrary contents.
        results.extend(copied.chunks(width + 4).flat_map(|row| &row[..width - 3]).copied());
        results.extend(copied[count / 2 * (width + 4)..].chunks(width + 4).flat_map(|row| &row[width..]));
        // Choices of two experts, then of one.
        let mut choices = filled(backend, &[0.0, 2.0, 0.25, 0.75, 1.0, 3.0, 0.5, 1.5], 4)?;
        backend.weigh_choices(&[2.0, 3.0, 4.0], 0..2, &mut choices)?;
        results.extend(columns(backend, &choices, 0..2, (4, 4))?);
        let of_rows: Vec<f32> = (0..count).flat_map(|row| [0.0, 0.5 + row as f32]).collect();
        let mut choices = filled(backend, &of_rows, 2)?;
        backend.weigh_input(&mut choices, 0..count, &mut x)?;
        results.extend(columns(backend, &choices, 0..count, (2, 2))?);
        results.extend(columns(backend, &x, 0..count, (width, width))?);
        Ok(results)
    }
}

/// What encoders do to rows in place.
struct Curves<'a> {
    x: &'a [f32],
    norm: &'a LayerNorm,
}

impl Work for Curves<'_> {
    fn run<B: Backend>(&self, backend: &mut B) -> Result<Vec<f32>, ComputeError> {
        let width = self.norm.weight.len();
        let count = self.x.len() / width;
        let mut x = filled(backend, self.x, width)?;
        backend.layer_norm(self.norm, count / 2..count, &mut x)?;
        let mut results = columns(backend, &x, 0..count, (width, width))?;
        for curve in [Curve::Relu, Curve::Gelu, Curve::GeluTanh, Curve::Silu, Curve::Tanh] {
            let mut x = filled(backend, self.x, width)?;
            backend.bend(curve, 0..count, &mut x)?;
            results.extend(columns(backend, &x, 0..count, (width, width))?);
        }
        Ok(results)
    }
}

/// Heads that are gated, in columns 2 and following of rows that are then cleared in part.
struct Gated<'a> {
    x: &'a [f32],
    gates: &'a [f32],
    heads: usize,
    dim: usize,
}

impl Work for Gated<'_> {
    fn run<B: Backend>(&self, backend: &mut B) -> Result<Vec<f32>, ComputeError> {
        let (count, width) = (self.gates.len() / self.heads, self.heads * self.dim + 5);
        let mut x = filled(backend, self.x, width)?;
        let gates = filled(backend, self.gates, self.heads)?;
        backend.gate_heads(&gates, (2, self.dim), count / 2..count, &mut x)?;
        let mut results = columns(backend, &x, 0..count, (width, width))?;
        backend.clear(count / 2..count, &mut x)?;
        results.extend(columns(backend, &x, 0..count, (width, width))?);
        Ok(results)
    }
}

/// Rows with few bits.
struct Rounded<'a> {
    rounding: Rounding,
    x: &'a [f32],
    width: usize,
}

impl Work for Rounded<'_> {
    fn run<B: Backend>(&self, backend: &mut B) -> Result<Vec<f32>, ComputeError> {
        let (count, width) = (self.x.len() / self.width, self.width);
        let mut x = filled(backend, self.x, width)?;
        backend.round(self.rounding, count / 2..count, &mut x)?;
        columns(backend, &x, 0..count, (width, width))
    }
}

/// Sums of the residual stream; the last one is mixed with none, some or all of the others.
struct Mix<'a> {
    before: &'a [Vec<f32>],
    x: &'a [f32],
    weight: &'a [f32],
}

impl Work for Mix<'_> {
    fn run<B: Backend>(&self, backend: &mut B) -> Result<Vec<f32>, ComputeError> {
        let width = self.weight.len();
        let count = self.x.len() / width;
        let before = self.before.iter().map(|x| filled(backend, x, width)).collect::<Result<Vec<_>, _>>()?;
        let x = filled(backend, self.x, width)?;
        let mut results = Vec::new();
        for (before, rows) in
            [(&before[..0], 0..count), (&before[..], 0..count), (&before[1..], count / 2..count)]
        {
            let mut out = backend.buffer(count, width)?;
            backend.mix(before, &x, rows.clone(), (self.weight, 0.5), &mut out)?;
            results.extend(columns(backend, &out, rows, (width, width))?);
        }
        Ok(results)
    }
}

impl<B: Backend> Suite<'_, B> {
    pub(super) fn changes(&mut self) {
        for (rows, width) in [(1, 9), (2, 33), (7, 16)] {
            let x = self.random.numbers(rows * width);
            self.compare(
                format!("changes of {rows} rows of {width}"),
                self.limits.rows,
                Changes { x: &x, width },
            );
        }
        for (rows, width) in [(1, 9), (2, 48), (9, 33), (1, 1030), (70, 258)] {
            let x: Vec<f32> = self.random.numbers(rows * width).iter().map(|x| 3.0 * x + 1.0).collect();
            let [weight, bias] = [(); 2].map(|()| self.random.numbers(width));
            let work = Curves { x: &x, norm: &LayerNorm { weight, bias, eps: 1e-12 } };
            self.compare(format!("LayerNorm and curves, {rows} rows of {width}"), self.limits.rows, work);
        }
        for (rows, heads, dim) in [(1, 1, 16), (3, 5, 33), (70, 8, 128)] {
            let x = self.random.numbers(rows * (heads * dim + 5));
            let gates: Vec<f32> = self.random.numbers(rows * heads).iter().map(|x| 5.0 * x).collect();
            let work = Gated { x: &x, gates: &gates, heads, dim };
            self.compare(format!("gates of {heads} heads of {dim}, {rows} rows"), self.limits.rows, work);
        }
        for rounding in [Rounding::E4m3, Rounding::E2m1, Rounding::ScaledE2m1] {
            // The last columns are no whole group.
            for (rows, width) in [(1, 32), (5, 43), (40, 520)] {
                let x = self.roundable(rows * width, rounding);
                let work = Rounded { rounding, x: &x, width };
                self.compare(format!("{rounding:?}, {rows} rows of {width}"), 0.0, work);
            }
        }
        for (rows, width, sums) in [(1, 48, 1), (5, 70, 4)] {
            let before: Vec<_> = (0..sums).map(|_| self.random.numbers(rows * width)).collect();
            let (x, weight) = (self.random.numbers(rows * width), self.random.numbers(width));
            let work = Mix { before: &before, x: &x, weight: &weight };
            self.compare(format!("mixes of {sums} sums, {rows} rows of {width}"), self.limits.rows, work);
        }
    }

    /// Numbers of all sizes: ties, and numbers that scales are rounded up for, among them.
    fn roundable(&mut self, count: usize, rounding: Rounding) -> Vec<f32> {
        let most: f32 = if rounding == Rounding::E4m3 { 448.0 } else { 6.0 };
        let number = |i: usize| {
            let size = 2.0f32.powi((i / 16 % 23) as i32 - 14);
            let x = self.random.number();
            size * match i % 16 {
                0 => most,
                1 => most.next_up(),
                2 => 1.0625 * most,
                3 => 0.0,
                4..=9 => (8.0 * x).round() / 4.0,
                _ => x * most,
            }
        };
        (0..count).map(number).collect()
    }
}

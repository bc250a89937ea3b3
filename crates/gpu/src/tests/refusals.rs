//! Wrong kernels are found and refused by name, and the next form is used.

use thunder_collectives::Group;
use thunder_compute::conformance::{chosen_outputs, likely_outputs};
use thunder_compute::{
    Activations, Backend, ComputeError, Device, Encoding, Float, MatrixSource, Reference, RowOrder, Strided,
};

use super::device;
use crate::kernel::{Change, Draw, HeldRecurrence, Input, Kernel, Role, Rule, Sum};
use crate::proof::{Family, Numbers, recurrence};
use crate::{GpuBackend, GpuConfig};

const ROWS: usize = 40;
const COLS: usize = 2048;

/// A 4-bit matrix, and its expected products.
struct Work {
    weight: Vec<u8>,
    scales: Vec<u8>,
    offsets: Vec<u8>,
    x: Vec<f32>,
}

impl Work {
    fn new() -> Self {
        let mut random = thunder_testing::Random::new(3);
        let halves = |value: f32| half::f16::from_f32(value).to_le_bytes().repeat(ROWS * COLS / 64);
        let weight = random.bytes(ROWS * COLS / 2);
        Self { weight, scales: halves(0.1), offsets: halves(-0.75), x: Numbers(1).take(COLS) }
    }

    fn source(&self) -> MatrixSource<'_> {
        let view = |bytes| Strided { bytes, stride: bytes.len() / ROWS, row_bytes: bytes.len() / ROWS };
        MatrixSource {
            rows: ROWS,
            cols: COLS,
            encoding: Encoding::Affine { bits: 4, group: 64, scales: Float::F16 },
            weight: view(&self.weight),
            scales: Some(view(&self.scales)),
            offsets: Some(view(&self.offsets)),
            row_order: RowOrder::AsStored,
            first_row: 0,
            bias: None,
            pages: None,
        }
    }

    /// The largest difference of a product's outputs from the CPU's sums.
    fn error(&self, backend: &mut GpuBackend) -> Result<f32, ComputeError> {
        let w = backend.matrix(&[self.source()])?;
        let (mut x, mut out) = (backend.buffer(1, COLS)?, backend.buffer(1, ROWS)?);
        backend.write(&self.x, &mut x)?;
        backend.product(&x, 0..1, &w, &mut out)?;
        let (mut found, mut row) = (vec![0.0; ROWS], vec![0.0; COLS]);
        backend.read(&out, 0..1, &mut found)?;
        let mut most = 0.0f32;
        for (index, found) in found.iter().enumerate() {
            self.source().dequantize_row(index, &mut row);
            let expected: f64 = row.iter().zip(&self.x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum();
            most = most.max((found - expected as f32).abs());
        }
        Ok(most)
    }
}

fn opened(test: &str, activations: Activations) -> Option<GpuBackend> {
    let config = GpuConfig { activations, ..GpuConfig::default() };
    Some(GpuBackend::unproved(&device(test)?, config, Group::solo()).unwrap())
}

#[test]
fn subgroups_of_another_size_are_refused_and_memory_taken() {
    let Some(mut backend) =
        opened("subgroups_of_another_size_are_refused_and_memory_taken", Activations::F32)
    else {
        return;
    };
    // llvmpipe's subgroups have 8 lanes, so sums over them are wrong in kernels for 32.
    backend.has_subgroups = true;
    backend.device.sabotage =
        Some(|_, text| text.replace("+ subgroupShuffleXor(", "+ 0.5 * subgroupShuffleXor("));
    assert!(Work::new().error(&mut backend).unwrap() < 1e-2);
    assert!(backend.forms.values().all(|form| *form == Some(Sum::Shared)), "{:?}", backend.forms);
    assert!(backend.refusals().iter().any(|refused| refused.contains("Subgroup")), "{:?}", backend.refusals);
}

#[test]
fn wrong_products_of_bytes_are_refused_and_floats_taken() {
    let test = "wrong_products_of_bytes_are_refused_and_floats_taken";
    let Some(mut backend) = opened(test, Activations::Auto) else { return };
    let work = Work::new();
    let rounded = work.error(&mut backend).unwrap();
    assert!(rounded > 1e-2, "products of bytes are rounded, but this one is off by {rounded} only");
    let Some(mut backend) = opened(test, Activations::Auto) else { return };
    backend.device.sabotage = Some(|_, text| text.replace(", f32(", ", 1.2 * f32("));
    assert!(work.error(&mut backend).unwrap() < 1e-2);
    let bytes = backend.forms.iter().filter(|((_, input, ..), _)| *input == Input::Bytes);
    assert!(bytes.clone().count() > 0 && bytes.clone().all(|(_, form)| form.is_none()));
    assert!(backend.refusals().iter().any(|refused| refused.contains("Bytes")), "{:?}", backend.refusals);
}

#[test]
fn a_kernel_without_a_right_form_is_an_error_that_names_it() {
    let test = "a_kernel_without_a_right_form_is_an_error_that_names_it";
    let Some(mut backend) = opened(test, Activations::F32) else { return };
    backend.device.sabotage = Some(|kernel, text| match kernel {
        Kernel::Product(product) if product.role == Role::Plain => {
            text.replace("acc0 = fma(1.0", "acc0 = fma(1.1")
        }
        Kernel::Largest => text.replace("k > best", "k < best"),
        Kernel::Combine { .. } => text.replace("all.x / all.y", "all.x"),
        _ => text,
    });
    let error = Work::new().error(&mut backend).unwrap_err().to_string();
    assert!(error.contains("Levels(4)") && error.contains("off by"), "{error}");
    let error = backend.prove(Family::Rows).unwrap_err().to_string();
    assert!(error.contains("Rows"), "{error}");
    let error = backend.prove(Family::Tokens { latent: false, int8: false }).unwrap_err().to_string();
    assert!(error.contains("Tokens"), "{error}");
    backend.prove(Family::Experts).unwrap();
}

#[test]
fn wrong_likelihoods_are_refused_and_those_of_the_host_taken() {
    let test = "wrong_likelihoods_are_refused_and_those_of_the_host_taken";
    let x: Vec<f32> = Numbers(9).take(2 * 900).iter().map(|x| 5.0 * x).collect();
    let expected = likely_outputs(&mut Reference::new(Group::solo()), &x, 900).unwrap();
    let wrong: [Wrong; 3] = [
        |kernel, text| {
            if *kernel == Kernel::Likely { text.replace("sum += exp(", "sum = exp(") } else { text }
        },
        |kernel, text| {
            if *kernel == Kernel::Likely { text.replace("i > next.y", "i >= next.y") } else { text }
        },
        |_, text| text,
    ];
    for (index, wrong) in wrong.into_iter().enumerate() {
        let Some(mut backend) = opened(test, Activations::F32) else { return };
        backend.device.sabotage = Some(wrong);
        let found = likely_outputs(&mut backend, &x, 900).unwrap();
        let near = found.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-4);
        assert!(near && found.len() == expected.len(), "{index}");
        let is_refused = backend.refusals().iter().any(|refused| refused.contains("Likely"));
        assert_eq!(is_refused, index < 2, "{index}: {:?}", backend.refusals());
    }
}

/// A kernel's text, changed.
type Wrong = fn(&Kernel, String) -> String;

#[test]
fn wrong_changes_of_rows_are_refused() {
    let wrong: [Wrong; 6] = [
        |kernel, text| match kernel {
            Kernel::Change(Change::LayerNorm) => text.replace(" + args.eps", ""),
            _ => text,
        },
        |kernel, text| match kernel {
            Kernel::Change(Change::GateHeads) => text.replace("exp(-gate)", "exp(gate)"),
            _ => text,
        },
        |kernel, text| match kernel {
            Kernel::Change(Change::Round) => text.replace("rest > 3.0", "rest > 4.0"),
            _ => text,
        },
        |kernel, text| match kernel {
            Kernel::Change(Change::Clear) => text.replace("= 0.0", "= 1.0"),
            _ => text,
        },
        |kernel, text| match kernel {
            Kernel::Change(Change::AddValues) => text.replace("-select(-root", "-select(root"),
            _ => text,
        },
        |kernel, text| match kernel {
            Kernel::RouteAssigned => text.replace("return 1.0", "return 0.0"),
            _ => text,
        },
    ];
    for wrong in wrong {
        let Some(mut backend) = opened("wrong_changes_of_rows_are_refused", Activations::F32) else { return };
        backend.device.sabotage = Some(wrong);
        let error = backend.prove(Family::Changes).unwrap_err().to_string();
        assert!(error.contains("Changes") && error.contains("off by"), "{error}");
    }
}

#[test]
fn the_host_chooses_tokens_if_a_kernel_chooses_others_or_changes_logits_wrongly() {
    let test = "the_host_chooses_tokens_if_a_kernel_chooses_others_or_changes_logits_wrongly";
    let wrong: [fn(&Kernel, String) -> String; 4] = [
        |_, text| text.replace("least = middle + 1u", "least = middle + 2u"),
        |_, text| text.replace("value > 0.0)", "value < 0.0)"),
        |_, text| text.replace("i % 32u", "(i ^ 1u) % 32u"),
        |_, text| text.replace("if (i / 32u < words)", "if (true)"),
    ];
    for sabotage in wrong {
        let Some(mut backend) = opened(test, Activations::F32) else { return };
        // The kernels were compiled and proved when the backend was made.
        backend.device.draw = if backend.device.draw == Draw::WIDE { Draw::NARROW } else { Draw::WIDE };
        backend.device.forget(&Kernel::Edit);
        backend.device.forget_bindings();
        backend.device.sabotage = Some(sabotage);
        let x: Vec<f32> = (0..900).map(|column| (column * 41 % 100) as f32 / 20.0).collect();
        let found = chosen_outputs(&mut backend, &x, 900).unwrap();
        let expected = chosen_outputs(&mut Reference::new(Group::solo()), &x, 900).unwrap();
        assert_eq!(found, expected);
        let refusals = backend.refusals();
        assert!(refusals.iter().any(|refused| refused.contains("Draws")), "{refusals:?}");
    }
}

#[test]
fn states_stay_in_memory_if_those_in_registers_are_wrong() {
    let test = "states_stay_in_memory_if_those_in_registers_are_wrong";
    let Some(mut backend) = opened(test, Activations::F32) else { return };
    backend.device.sabotage = Some(|kernel, text| match kernel {
        // A row reads the queries of the next one.
        Kernel::HeldRecurrence(_) => {
            text.replace("= queries[first + ", "= queries[(first + QUADS) % (3u * QUADS) + ")
        }
        _ => text,
    });
    for rule in [Rule::Delta, Rule::ChannelDelta, Rule::StateSpace] {
        let of = (64, 20);
        let found = recurrence(&mut backend, rule, of).unwrap();
        let expected = recurrence(&mut Reference::new(Group::solo()), rule, of).unwrap();
        for (found, expected) in found.iter().flatten().zip(expected.iter().flatten()) {
            assert!(
                (found - expected).abs() < 1e-4 * expected.abs().max(1.0),
                "{rule:?}: {found}, {expected}"
            );
        }
        let form = Family::HeldState(HeldRecurrence { rule, keys: 64 });
        assert_eq!(backend.taken.get(&form), Some(&false));
    }
    assert_eq!(backend.refusals().len(), 3, "{:?}", backend.refusals());
}

#[test]
fn heads_are_multiplied_one_by_one_if_products_of_all_together_are_wrong() {
    let test = "heads_are_multiplied_one_by_one_if_products_of_all_together_are_wrong";
    let Some(found) = device(test) else { return };
    let (rows, heads) = (20, 3);
    let (work, x) = (Work::new(), Numbers(9).take(rows * heads * COLS));
    let sources = [work.source(), work.source(), work.source()];
    let mut results = Vec::new();
    for is_wrong in [false, true] {
        let config = GpuConfig { activations: Activations::F32, ..GpuConfig::default() };
        let mut backend = GpuBackend::new(&found, config, Group::solo()).unwrap();
        backend.device.sabotage = is_wrong.then_some(|kernel, text| match kernel {
            // All heads are added where the first one's results are.
            Kernel::Tiles(_) => text.replace("args.out_first + id.z * args.outputs", "args.out_first"),
            _ => text,
        });
        let w = backend.heads(&sources).unwrap();
        assert_eq!(w.matrices.len(), if is_wrong { heads } else { 1 }, "{:?}", backend.refusals());
        assert_eq!(backend.refusals().iter().any(|it| it.contains("products of heads")), is_wrong);
        let mut input = backend.buffer(rows, heads * COLS).unwrap();
        let mut out = backend.buffer(rows, heads * ROWS).unwrap();
        backend.write(&x, &mut input).unwrap();
        backend.head_products(&input, COLS, 0..rows, &w, &mut out).unwrap();
        let mut values = vec![0.0; rows * heads * ROWS];
        backend.read(&out, 0..rows, &mut values).unwrap();
        results.push(values);
    }
    let most = results[0].iter().zip(&results[1]).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(most < 1e-2, "off by {most}");
}

//! Measures what it costs to alternate between many kernels: the same dispatches in chains of one
//! kernel each, and in turn. `THUNDER_TEST_GPU=0 ... --ignored --nocapture switching`

use thunder_collectives::Group;
use thunder_compute::{Activations, Device};

use super::speed::{matrices, time};
use super::{backend, device};
use crate::GpuBackend;
use crate::kernel::{Input, Product, ProductShape, Role, Sum};
use crate::operations::products::ProductArguments;
use crate::proof::Weights;

#[test]
#[ignore = "a measurement, for a real GPU"]
fn switching() {
    let Some(found) = device("switching") else { return };
    let mut backend = backend(&found, Activations::Auto, Group::solo());
    let all = matrices(&mut backend, 4, 4096, 4096);
    let mut x = backend.buffer(1, 4096).unwrap();
    backend.write(&vec![0.5; 4096], &mut x).unwrap();
    let mut out = backend.buffer(1, 4096).unwrap();
    out.shape(1).unwrap();
    let (format, blocks) = (all[0].chunks[0].format, all[0].blocks);
    let bytes = backend.quantized(&x, 0..1, blocks, Input::Bytes, None).unwrap();
    let run = |backend: &mut GpuBackend, shape: Option<ProductShape>, index: usize| {
        let usual = Product::new(format, Input::Bytes, Role::Plain, Sum::Subgroup, 1);
        let product = Product { shape: shape.unwrap_or(usual.shape), ..usual };
        let chunk = &all[index % all.len()].chunks[0];
        let arguments = ProductArguments::new(Weights { chunk, blocks }, 4096, 0..1, bytes.stride(), &out);
        backend.record_product(product, (chunk, None), &bytes, &[], &arguments, (&out.memory, None)).unwrap();
    };
    let shape = |per, unroll, warps| Some(ProductShape::new(per, unroll, warps));
    let shapes = [
        None,
        shape(1, 4, 4),
        shape(2, 4, 4),
        shape(2, 4, 8),
        shape(2, 2, 4),
        shape(2, 2, 8),
        shape(4, 2, 4),
        shape(1, 2, 8),
    ];
    let mut sum = 0.0;
    for shape in shapes {
        let each = time(&mut backend, |backend, index| run(backend, shape, index));
        println!("{shape:?} {each:.2} us");
        sum += each;
    }
    for count in [2, 4, 8] {
        let mut of_chains = 0.0;
        for shape in &shapes[..count] {
            of_chains += time(&mut backend, |backend, index| run(backend, *shape, index)) / count as f64;
        }
        let each = time(&mut backend, |backend, index| run(backend, shapes[index % count], index));
        println!("{count} kernels in turn: {each:.2} us each, in chains {of_chains:.2}");
    }
    println!("mean of chains {:.2}", sum / 8.0);
    // A kernel that does almost nothing, between two others.
    let small = time(&mut backend, |backend, _| {
        backend.quantized(&x, 0..1, blocks, Input::Pairs, None).unwrap();
    });
    let both = time(&mut backend, |backend, index| {
        run(backend, None, index);
        backend.quantized(&x, 0..1, blocks, Input::Pairs, None).unwrap();
    });
    println!("rounding {small:.2} us, after a product {both:.2} us for both");
}

//! Kernels that have one form are correct on this device.

use thunder_collectives::Group;
use thunder_compute::Activations;

use super::{backend, device};
use crate::kernel::{
    AttendLatent, AttendLatentMatrices, AttendMany, AttendMatrices, AttendShared, AttendTiles, Draw,
    HeldRecurrence,
};
use crate::proof::Family;

#[test]
fn every_family_of_kernels_is_proved() {
    let Some(found) = device("every_family_of_kernels_is_proved") else { return };
    let mut backend = backend(&found, Activations::F32, Group::solo());
    let tokens = [(false, false), (false, true), (true, false), (true, true)];
    let tokens = tokens.map(|(latent, int8)| Family::Tokens { latent, int8 });
    let mut wrong = Vec::new();
    let selections = [false, true].into_iter().flat_map(|int8| {
        [Family::Selection { int8 }, Family::Compression { int8 }, Family::Pooling { int8 }]
    });
    let others = [Family::Experts, Family::State, Family::Changes];
    for family in tokens.into_iter().chain(others).chain(selections) {
        wrong.extend(backend.prove(family).err().map(|error| error.to_string()));
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    for family in [Family::CombinedLevels, Family::NormedLevels, Family::Likely] {
        assert!(backend.takes(family).unwrap(), "{:?}", backend.refusals());
    }
    for form in HeldRecurrence::all() {
        assert!(backend.takes(Family::HeldState(form)).unwrap(), "{:?}", backend.refusals());
    }
    let form = backend.device.draw;
    for form in [form, Draw::NARROW] {
        backend.device.draw = form;
        assert!(backend.takes(Family::Draws(form)).unwrap(), "{:?}", backend.refusals());
    }
}

#[test]
fn attention_that_shares_keys_and_values_is_proved() {
    let Some(found) = device("attention_that_shares_keys_and_values_is_proved") else { return };
    let mut backend = backend(&found, Activations::F32, Group::solo());
    let long = thunder_testing::is_long();
    let many = AttendMany::all().filter(|form| long || form.units == 16 || form.heads == 1);
    let tiles = AttendTiles::all().filter(|form| long || form.columns <= 128);
    let has_matrices = backend.has_attention_matrices();
    let matrices = AttendMatrices::all().filter(|_| has_matrices);
    let families = many.map(Family::Many).chain(tiles.map(Family::Tiles));
    let latent_matrices = AttendLatentMatrices::all().filter(|_| has_matrices).map(Family::LatentMatrices);
    let latent = AttendLatent::all().filter(|form| long || form.columns <= 256).map(Family::LatentTiles);
    let is_small = |form: &AttendShared| form.columns == 128 || (form.columns, form.heads) == (256, 8);
    let shared = AttendShared::all().filter(|form| long || is_small(form)).map(Family::Shared);
    for family in
        families.chain(matrices.map(Family::Matrices)).chain(latent).chain(shared).chain(latent_matrices)
    {
        backend.takes(family).unwrap();
    }
    assert!(backend.refusals().is_empty(), "{:#?}", backend.refusals());
}

//! A weight file that is cut short while the model is open.

use std::path::Path;
use std::process::Command;

use thunder_model::ModelFolder;
use thunder_model::synth::{self, Shape};
use thunder_model::weights::Role;

/// Set for the process that reads the cut file: its folder.
const CUT: &str = "THUNDER_TEST_CUT_FOLDER";
const TEST: &str = "changed_file::a_file_that_is_cut_while_it_is_read_is_named";

#[test]
fn a_file_that_is_cut_while_it_is_read_is_named() {
    if let Some(folder) = std::env::var_os(CUT) {
        read_cut(Path::new(&folder));
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let shape = Shape { layers: 2, vocab: 512, ..Shape::named("qwen3-tiny").expect("it is listed") };
    synth::write(&shape, Some(4), 64, folder.path(), 0, &mut |_, _| {}).expect("written");
    let itself = std::env::current_exe().expect("this program");
    let output = Command::new(itself)
        .args(["--exact", TEST, "--nocapture"])
        .env(CUT, folder.path())
        .output()
        .expect("it starts");
    let error = String::from_utf8_lossy(&output.stderr);
    let file = folder.path().join("model.safetensors");
    assert_eq!(output.status.code(), Some(1), "{:?} {error}", output.status);
    assert!(error.contains(&format!("error: {}: the file became shorter", file.display())), "{error}");
}

fn read_cut(path: &Path) {
    let folder = ModelFolder::open(path).expect("it opens");
    let file = std::fs::File::options().write(true).open(path.join("model.safetensors")).expect("weights");
    file.set_len(4096).expect("cut");
    let norm = folder.weights.vector(Role::OutputNorm, &[folder.spec.hidden]);
    panic!("a cut file was read: {norm:?}");
}

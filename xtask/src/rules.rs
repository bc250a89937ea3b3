//! Tests of what ARCHITECTURE.md says about the source tree.

use crate::repository;
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Folders and files below `crates` that may have `unsafe`, as ARCHITECTURE.md lists them.
const UNSAFE: [&str; 11] = [
    "verbs/src",
    "collectives/src",
    "compute/src/cpu",
    "compute/src/cpu.rs",
    "compute/src/memory.rs",
    "gpu/src/device",
    "gpu/src/memory.rs",
    "model/src/weights",
    "model/src/weights.rs",
    "cluster/src/launch",
    "testing/src/allocations.rs",
];

fn rust_files(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            rust_files(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

#[test]
fn unsafe_code_is_only_where_the_architecture_says() {
    let crates = repository().join("crates");
    let mut files = Vec::new();
    for package in fs::read_dir(&crates).unwrap() {
        rust_files(&package.unwrap().path().join("src"), &mut files);
    }
    assert!(files.len() > 100, "the sources are not where this test looks");
    let has_unsafe = |line: &str| {
        let code = line.split("//").next().unwrap_or("");
        ["unsafe {", "unsafe fn", "unsafe impl", "unsafe extern", "unsafe trait"]
            .iter()
            .any(|word| code.contains(word))
    };
    for file in files {
        let name = file.strip_prefix(&crates).unwrap();
        let is_allowed =
            UNSAFE.iter().any(|allowed| name.starts_with(allowed)) || name.to_string_lossy().contains("test");
        let text = fs::read_to_string(&file).unwrap();
        let found = (1..).zip(text.lines()).find(|(_, line)| has_unsafe(line));
        assert!(is_allowed || found.is_none(), "crates/{}: {found:?}", name.display());
    }
}

#[test]
fn paths_in_documents_exist() {
    for document in [
        "ARCHITECTURE.md",
        "CONTRIBUTING.md",
        "README.md",
        "bench/README.md",
        "docs/README.md",
        "docs/capacity.md",
        "docs/collectives.md",
        "docs/dashboard.md",
        "docs/gpu.md",
        "docs/hosting.md",
        "docs/operations.md",
        "docs/security.md",
        "docs/troubleshooting.md",
        "docs/performance.md",
        "docs/kernels.md",
        "docs/lab/README.md",
        "tests/README.md",
        "tests/golden/README.md",
        "tools/README.md",
    ] {
        let text = fs::read_to_string(repository().join(document)).unwrap();
        let paths = text.split('`').skip(1).step_by(2).filter(|code| {
            ["crates/", "docs/", "tools/", "tests/", "xtask/", "bench/"]
                .iter()
                .any(|folder| code.starts_with(folder))
                && !code.contains([' ', '*', '…'])
                && !code.contains("MACHINE")
        });
        for path in paths {
            assert!(repository().join(path).exists(), "{document}: {path} does not exist");
        }
        let folder = repository().join(document);
        let links = text.split("](").skip(1).filter_map(|rest| rest.split([')', '#']).next());
        for link in links.filter(|link| !link.is_empty() && !link.contains("://")) {
            assert!(folder.with_file_name("").join(link).exists(), "{document}: {link} does not exist");
        }
    }
}

/// Each package of a build with its features, as cargo resolves them for this selection of packages
/// and kinds of dependencies.
fn resolved_features(selection: &[&str]) -> BTreeSet<String> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut tree = Command::new(cargo);
    tree.current_dir(repository()).args(["tree", "--locked", "--offline", "--prefix", "none"]);
    let output = tree.args(["--format", "{p} {f}"]).args(selection).output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "cargo tree {selection:?}: {error}");
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines().map(|line| line.replace(" (proc-macro)", "").replace(" (*)", "")).collect()
}

/// A package with other features is built a second time, and so are all packages that depend on it.
#[test]
fn the_program_and_the_tests_build_dependencies_with_the_same_features() {
    let tests = resolved_features(&["--workspace", "--edges", "normal,build,dev"]);
    for selection in [&[][..], &["--package", "thunder"], &["--workspace"]] {
        let program = resolved_features(&[selection, &["--edges", "normal,build"]].concat());
        assert!(program.len() > 100, "cargo tree lists packages in another form");
        let different: Vec<_> = program.difference(&tests).collect();
        assert!(
            different.is_empty(),
            "cargo build {selection:?} uses other features than the tests, which use more: name them in \
             [workspace.dependencies] of Cargo.toml: {different:#?}"
        );
    }
}

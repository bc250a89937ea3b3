//! The device's side of a sum over ranks, as three kernels.
//!
//! On Metal they are in its own language. WGSL's accesses are coherent within a device; whether the
//! host sees them, and they the host's, while a kernel runs, is not said. Metal has accesses and
//! fences for that. Elsewhere the same steps are WGSL, so that they can be tested.

use super::exchange::{Exchange, often};
use super::{Access, EXCHANGE_THREADS};

/// A step of an exchange.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Coherent {
    /// Stores partial sums. May have any number of workgroups.
    Send,
    /// Waits for the sums. Has one workgroup.
    Await,
    /// Takes the sums. May have any number of workgroups.
    Take { adds: bool },
}

/// A kernel in Metal's language.
pub(crate) struct MetalKernel {
    pub text: String,
    /// The function's name.
    pub name: &'static str,
    /// Threads of a workgroup.
    pub threads: u32,
}

impl Coherent {
    pub const ALL: [Self; 4] =
        [Self::Send, Self::Await, Self::Take { adds: false }, Self::Take { adds: true }];

    /// The partial sums; or the outbox, the state and the flag; or the outbox, the state, the inbox
    /// and the rows that get the sums.
    pub fn bindings(self) -> Vec<Access> {
        use Access::{Read, Write};
        match self {
            Self::Send => vec![Read, Write, Write],
            Self::Await => vec![Write; 3],
            Self::Take { .. } => vec![Write; 4],
        }
    }

    pub fn source(self) -> String {
        let (bindings, body) = match self {
            Self::Send => return Exchange::Send.source(),
            Self::Await => (
                "@group(0) @binding(2) var<storage, read_write> answered: array<atomic<u32>>;\n",
                include_str!("exchange_wait.wgsl").to_owned(),
            ),
            Self::Take { .. } => (
                "@group(0) @binding(2) var<storage, read_write> inbox: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read_write> to: array<vec4<f32>>;\n",
                "    let reason = atomicLoad(&state[0]);\n".to_owned() + include_str!("exchange_take.wgsl"),
            ),
        };
        let first = "@group(0) @binding(0) var<storage, read_write> outbox: array<vec4<u32>>;
@group(0) @binding(1) var<storage, read_write> state: array<atomic<u32>>;\n";
        include_str!("exchange.wgsl")
            .replace("$BINDINGS", &(first.to_owned() + bindings))
            .replace("$BODY", &body)
            .replace("$TAKE", &format!("to[args.first + i] {} bitcast<vec4<f32>>(words);", self.sets()))
            .replace("$LOOK", &often())
    }

    /// The same for Metal.
    pub fn metal(self) -> MetalKernel {
        let (name, threads) = match self {
            Self::Send => ("leave", EXCHANGE_THREADS),
            Self::Await => ("await_answer", 32),
            Self::Take { .. } => ("take", EXCHANGE_THREADS),
        };
        let text = include_str!("exchange.metal").replace("$SETS", self.sets());
        MetalKernel { text, name, threads }
    }

    fn sets(self) -> &'static str {
        if self == (Self::Take { adds: true }) { "+=" } else { "=" }
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    /// There is no Metal compiler here: a C++ compiler takes the text with the few words of Metal
    /// that it has, and the program that it makes runs an exchange, thread after thread.
    #[test]
    fn the_kernels_in_metals_language_do_what_those_in_wgsl_do() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        std::fs::write(path("metal_stdlib"), include_str!("../tests/metal_stdlib.hpp")).unwrap();
        for adds in [false, true] {
            let program = Coherent::Take { adds }.metal().text
                + include_str!("../tests/exchange_metal.cpp").replace("$ADDS", &adds.to_string()).as_str();
            std::fs::write(path("program.cpp"), program).unwrap();
            let mut compiler = Command::new("c++");
            compiler.args([
                "-std=c++17",
                "-Wall",
                "-Werror",
                "-Wno-attributes",
                "-Wno-unknown-pragmas",
                "-I",
            ]);
            compiler.arg(folder.path()).arg("-o").arg(path("program")).arg(path("program.cpp"));
            let Ok(made) = compiler.output() else {
                let test = "the_kernels_in_metals_language_do_what_those_in_wgsl_do";
                return thunder_testing::skip(test, "c++ is not installed");
            };
            assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
            let ran = Command::new(path("program")).output().unwrap();
            assert!(ran.status.success(), "adds: {adds}: {}", String::from_utf8_lossy(&ran.stdout));
        }
    }
}

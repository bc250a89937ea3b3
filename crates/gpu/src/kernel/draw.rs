//! The kernel that chooses tokens.

use thunder_compute::Choice;

/// Words of a choice in a table.
const WORDS_OF_CHOICE: usize = 5;

/// A form of the kernel. A workgroup has a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Draw {
    threads: u32,
}

impl Draw {
    /// For every device.
    pub const NARROW: Self = Self { threads: 256 };
    /// For devices with workgroups of 1024 threads, which read a row faster.
    pub const WIDE: Self = Self { threads: 1024 };

    /// The form for a device.
    pub fn of(limits: &wgpu::Limits, api: &str) -> Self {
        let most = limits.max_compute_invocations_per_workgroup.min(limits.max_compute_workgroup_size_x);
        // Metal may allow a pipeline fewer threads than its limits say.
        if most >= Self::WIDE.threads && api != "metal" { Self::WIDE } else { Self::NARROW }
    }

    pub fn source(self) -> String {
        include_str!("draw.wgsl")
            .replace("$THREADS", &self.threads.to_string())
            .replace("$LIMIT", super::LIMIT)
            .replace("$KEY", super::KEY)
    }
}

/// What the kernel reads of a choice.
pub(crate) fn words_of(choice: &Choice) -> [u32; WORDS_OF_CHOICE] {
    let factor = match choice.temperature > 0.0 {
        true => std::f32::consts::LOG2_E / choice.temperature,
        false => 0.0,
    };
    let share = choice.share().unwrap_or(u32::MAX);
    [factor.to_bits(), choice.top_k, share, choice.least(), choice.draw]
}

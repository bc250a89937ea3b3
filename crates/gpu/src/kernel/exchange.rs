//! The device's side of a sum over ranks, as one kernel or two.

use super::Access;

/// Threads of a workgroup.
pub(crate) const EXCHANGE_THREADS: u32 = 1024;

/// How a thread polls the flag.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Look {
    /// Once a round.
    Once,
    /// Many times a round, by atomic additions of zero, which no compiler optimises away. A
    /// software driver ends loops after so few rounds that the host would have no time to answer.
    Often,
}

/// What an exchange does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Exchange {
    /// Stores partial sums. May have any number of workgroups.
    Send,
    /// Waits for the sums of what [`Exchange::Send`] stored. May have any number of workgroups.
    Receive { adds: bool, look: Look },
    /// Does both. Has one workgroup, because it would wait for others that the device may not have
    /// started.
    Both { adds: bool, look: Look },
}

/// [`Look::Often`] at the flag of an exchange.
pub(super) fn often() -> String {
    "seen = atomicAdd(&answered[0], 0u);\n".repeat(64)
}

impl Exchange {
    #[cfg(test)]
    pub fn all() -> Vec<Self> {
        let mut all = vec![Self::Send];
        for look in [Look::Once, Look::Often] {
            for adds in [false, true] {
                all.extend([Self::Receive { adds, look }, Self::Both { adds, look }]);
            }
        }
        all
    }

    fn receives(self) -> bool {
        self != Self::Send
    }

    fn sends(self) -> bool {
        !matches!(self, Self::Receive { .. })
    }

    fn adds(self) -> bool {
        matches!(self, Self::Receive { adds: true, .. } | Self::Both { adds: true, .. })
    }

    /// If it sends, the partial sums; then the outbox and the state; if it receives, the inbox, its
    /// flag, and the rows that get the sums, unless these are the partial sums.
    pub fn bindings(self) -> Vec<Access> {
        use Access::{Read, Write};
        match self {
            Self::Send => vec![Read, Write, Write],
            Self::Receive { .. } => vec![Write; 5],
            Self::Both { adds: false, .. } => vec![Write; 5],
            Self::Both { adds: true, .. } => vec![Read, Write, Write, Write, Write, Write],
        }
    }

    pub fn source(self) -> String {
        let mut declared: Vec<(&str, &str)> = Vec::new();
        // If nothing is added, the sums replace the partial sums.
        let is_in_place = self.sends() && self.receives() && !self.adds();
        if self.sends() {
            declared.push(("x", "array<vec4<f32>>"));
        }
        declared.push(("outbox", "array<vec4<u32>>"));
        declared.push(("state", "array<atomic<u32>>"));
        if self.receives() {
            // The host writes this meanwhile. It is declared as if kernels wrote it, because
            // read-only data may come from a cache that does not see the host's writes.
            declared.push(("inbox", "array<vec4<u32>>"));
            declared.push(("answered", "array<atomic<u32>>"));
            if !is_in_place {
                declared.push(("to", "array<vec4<f32>>"));
            }
        }
        let binding = |(index, (name, kind)): (usize, &(&str, &str))| {
            let access = if self.bindings()[index] == Access::Read { "read" } else { "read_write" };
            format!("@group(0) @binding({index}) var<storage, {access}> {name}: {kind};\n")
        };
        let bindings: String = declared.iter().enumerate().map(binding).collect();
        let (to, sets) = (if is_in_place { "x" } else { "to" }, if self.adds() { "+=" } else { "=" });
        let take = format!("{to}[args.first + i] {sets} bitcast<vec4<f32>>(words);");
        let look = match self {
            Self::Receive { look: Look::Often, .. } | Self::Both { look: Look::Often, .. } => often(),
            _ => "seen = atomicLoad(&answered[0]);".to_owned(),
        };
        let mut body = String::new();
        if self.sends() {
            body += include_str!("exchange_send.wgsl");
        }
        if self.sends() && self.receives() {
            body += "    storageBarrier();\n    workgroupBarrier();\n";
        }
        if self.receives() {
            body += include_str!("exchange_wait.wgsl");
            body += include_str!("exchange_take.wgsl");
        }
        include_str!("exchange.wgsl")
            .replace("$BINDINGS", &bindings)
            .replace("$BODY", &body)
            .replace("$TAKE", &take)
            .replace("$LOOK", &look)
    }
}

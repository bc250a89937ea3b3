//! The graph as text.

use std::fmt::Write as _;

use super::{Desk, End, LooseKind, ShapeKind};
use crate::machine::Attached;

impl Desk {
    /// The desk for a terminal: each machine with its ports, a table of pairs from three machines
    /// on, the shape, and its best use.
    pub fn text(&self) -> String {
        let mut text = String::new();
        for (index, machine) in self.machines.iter().enumerate() {
            let _ = writeln!(text, "{}  {}", machine.name, machine.description());
            for port in 0..machine.ports.len() {
                let _ = writeln!(text, "  {}", self.port_line(End { machine: index, port }));
            }
            if machine.ports.is_empty() {
                text.push_str("  no Thunderbolt port was found\n");
            }
        }
        if self.machines.len() > 2 {
            let _ = write!(text, "\n{}", self.matrix());
        }
        let shape = self.shape();
        text.push('\n');
        if shape.kind != ShapeKind::Alone {
            let _ = writeln!(text, "The cables form {}.", shape.kind.name());
        }
        for advice in self.advice() {
            let _ = writeln!(text, "- {advice}");
        }
        for slow in self.cables.iter().filter_map(|cable| self.slow_cable(cable)) {
            let _ = writeln!(text, "- slow: {slow}");
        }
        text
    }

    fn port_line(&self, end: End) -> String {
        let port = self.port(end);
        let interface = port.interface.as_deref().unwrap_or("no interface");
        let head = format!("port {} ({interface})", port.name);
        if let Some(cable) = self.cables.iter().find(|cable| cable.ends.contains(&end)) {
            let other = if cable.ends[0] == end { cable.ends[1] } else { cable.ends[0] };
            let gbits = cable.gbits.map_or_else(|| "?".to_owned(), |gbits| gbits.to_string());
            let rdma = self.rdma_obstacles(cable).is_empty();
            let (line, kind) = if rdma { ("═══", "RDMA") } else { ("───", "TCP") };
            let doubt = if cable.certain { "" } else { "  (which of several ports is not known yet)" };
            return format!("{head} {line} {gbits} Gbit/s {line} {}  {kind}{doubt}", self.name(other));
        }
        if let Some(loose) = self.loose.iter().find(|loose| loose.end == end) {
            return format!("{head} ┄┄┄ {}", self.loose_words(&loose.to));
        }
        match &port.attached {
            Attached::Nothing => {
                let most = port.most_gbits.map(|most| format!(", up to {most} Gbit/s")).unwrap_or_default();
                format!("{head} free{most}")
            }
            Attached::Device { name } => format!("{head} ─── {name}"),
            Attached::Unknown => format!("{head} ┄┄┄ something that has not said its name"),
            Attached::Machine { name, .. } => format!("{head} ┄┄┄ {name}"),
        }
    }

    /// A loose end in words.
    pub fn loose_words(&self, to: &LooseKind) -> String {
        match to {
            LooseKind::Stranger { name } => {
                let unread = self.machines.iter().find(|machine| machine.ports_unread().is_some());
                match unread {
                    Some(machine) => {
                        format!("{name}, perhaps {}, whose ports could not be read", machine.name)
                    }
                    None => format!("{name}, which is not among --hosts"),
                }
            }
            LooseKind::OneSided { machine } => {
                format!("{}, which does not see this end", self.machines[*machine].name)
            }
            LooseKind::Behind { device } => format!("a machine behind {device}: connect the two directly"),
            LooseKind::Itself => "another port of the same machine".to_owned(),
        }
    }

    /// Gbit/s of each pair; `×2` for two cables.
    fn matrix(&self) -> String {
        let names: Vec<&str> = self.machines.iter().map(|machine| machine.name.as_str()).collect();
        let width = names.iter().map(|name| name.chars().count()).max().unwrap_or(0).max(5);
        let cell = |one: usize, other: usize| {
            let cables: Vec<_> = self.between(one, other).collect();
            let Some(first) = cables.first() else { return if one == other { "·" } else { "-" }.to_owned() };
            let gbits = first.gbits.map_or_else(|| "?".to_owned(), |gbits| gbits.to_string());
            if cables.len() > 1 { format!("{gbits}×{}", cables.len()) } else { gbits }
        };
        let mut text = format!("{:width$}", "");
        names.iter().for_each(|name| {
            let _ = write!(text, "  {name:>width$}");
        });
        text.push('\n');
        for (row, name) in names.iter().enumerate() {
            let _ = write!(text, "{name:width$}");
            for column in 0..names.len() {
                let _ = write!(text, "  {:>width$}", cell(row, column));
            }
            text.push('\n');
        }
        text
    }
}

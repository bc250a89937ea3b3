//! Forms that matrices of a format will need: compiled at the same time, when the first one is
//! loaded. One after the other they take 0.1 to 0.2 s each on a driver that has not seen them.

use crate::backend::GpuBackend;
use crate::format::Format;
use crate::kernel::{Input, Kernel, Leaves, Product, Role, Sum};

impl GpuBackend {
    /// Compiles products in these roles with matrices of a format. What a driver in software
    /// compiles takes this machine's cores, so only what is used is compiled there.
    pub(crate) fn prepare_products(&mut self, format: Format, roles: &[Role]) {
        if !self.is_real {
            return;
        }
        let sum = if self.has_subgroups { Sum::Subgroup } else { Sum::Shared };
        let mut kernels = Vec::new();
        for &role in roles {
            if !self.prepared.insert((format, role)) {
                continue;
            }
            let mut inputs = match role {
                Role::Plain => vec![Input::Floats, self.plain_input(), self.gated_input()],
                Role::Gated | Role::ExpertGated => vec![self.plain_input()],
                Role::ExpertDown => vec![self.gated_input()],
            };
            inputs.retain(|input| *input == Input::Floats || format.has_scales());
            inputs.dedup();
            let leaves = match (role, self.gated_input()) {
                (Role::Plain | Role::ExpertDown, _) => Leaves::Normed,
                (_, Input::Pairs) => Leaves::Pairs,
                (_, _) => Leaves::Bytes,
            };
            for input in inputs {
                let is_of_experts = matches!(role, Role::ExpertGated | Role::ExpertDown);
                for batch in input.batches(if is_of_experts { 1 } else { usize::MAX }) {
                    let product = Product::new(format, input, role, sum, batch);
                    let leaving = product.leaving(leaves);
                    kernels.push(Kernel::Product(product));
                    kernels.extend(
                        (product.can_leave() && leaving.can_bind()).then_some(Kernel::Product(leaving)),
                    );
                }
            }
        }
        self.device.prepare_together(&kernels);
    }
}

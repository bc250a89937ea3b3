//! Rows for which the device waits while the host sums them over the ranks. The device stores them
//! in memory of the host and takes them from there, so the host copies nothing.

use thunder_compute::ComputeError;

use super::Device;
use super::shared::{Place, Shared};
use crate::buffer::stride;
use crate::kernel::Kernel;
use crate::mailbox::Rows;
use crate::operations::MAX_GROUPS;
use crate::proof::Numbers;

type Outcome = Result<(), ComputeError>;

/// Smallest memory.
const LEAST_WORDS: usize = 64 << 10;

/// The memory. Grows with the rows.
pub(crate) struct HostRows {
    shared: Shared,
}

impl HostRows {
    /// Memory that has passed its proof. The inner error says why there is none.
    pub fn proved(device: &mut Device) -> Result<Result<Self, String>, ComputeError> {
        let Some(shared) = device.shared(size_of::<f32>() * LEAST_WORDS, Place::Host)? else {
            return Ok(Err("its driver gives no memory that host and device both see".to_owned()));
        };
        let mut rows = Self { shared };
        let proved = rows.prove(device)?;
        Ok(proved.map(|()| rows))
    }

    /// Stores rows without their padding, and waits for the device. `None` if it has no memory for
    /// them.
    pub fn stored(
        &mut self,
        device: &mut Device,
        rows: Rows<'_>,
    ) -> Result<Option<&mut [f32]>, ComputeError> {
        let words = rows.rows * rows.width;
        let (bytes, most) = (size_of::<f32>() * words, device.max_binding_bytes as usize);
        if bytes as u64 > self.shared.memory.bytes() {
            let larger = bytes.next_power_of_two().min(most);
            match if bytes <= most { device.shared(larger, Place::Host)? } else { None } {
                Some(larger) => {
                    device.forget_bindings_of(|kernel| matches!(kernel, Kernel::HostRows { .. }));
                    self.shared = larger;
                }
                None => return Ok(None),
            }
        }
        self.copy(device, rows, Kernel::HostRows { takes: false })?;
        device.submit()?;
        device.wait()?;
        // SAFETY: the device has finished all commands, and only those of `self` use this memory:
        // none is recorded while the result borrows `self`. The mapping has at least this many
        // words, is aligned, and holds numbers of any bits.
        Ok(Some(unsafe { std::slice::from_raw_parts_mut(self.shared.start().cast::<f32>(), words) }))
    }

    /// Records that the device takes the rows. Padding is zero then.
    pub fn take(&self, device: &mut Device, rows: Rows<'_>) -> Outcome {
        self.copy(device, rows, Kernel::HostRows { takes: true })
    }

    fn copy(&self, device: &mut Device, rows: Rows<'_>, kernel: Kernel) -> Outcome {
        let Rows { x, first, rows, width, stride } = rows;
        let count = rows * stride;
        let groups = count.div_ceil(256).min(MAX_GROUPS);
        let arguments = [first, count, width, stride, groups].map(|word| word as u32);
        device.dispatch(&kernel, &[x, &self.shared.memory], &arguments, [groups as u32, 1, 1])
    }

    /// Stores, changes and takes rows several times.
    fn prove(&mut self, device: &mut Device) -> Result<Result<(), String>, ComputeError> {
        const ROWS: usize = 3;
        const WIDTH: usize = 4090;
        let stride = stride(WIDTH);
        for round in 0..3 {
            let numbers = Numbers(71 + round).take(ROWS * stride);
            let bits = numbers.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            let x = device.filled(&bits, "a proof of sums")?;
            // Without the first row.
            let rows = Rows { x: &x, first: stride, rows: ROWS - 1, width: WIDTH, stride };
            let Some(found) = self.stored(device, rows)? else { return Ok(Err("no memory".to_owned())) };
            let stored = numbers[stride..].chunks(stride).flat_map(|row| &row[..WIDTH]);
            if !found.iter().eq(stored) {
                return Ok(Err("rows that it stores differ".to_owned()));
            }
            found.iter_mut().for_each(|x| *x += 1.0);
            self.take(device, rows)?;
            let mut taken = Vec::new();
            device.read(&x, 0..ROWS * stride, &mut taken)?;
            let expected = |at: usize| match (at < stride, at % stride < WIDTH) {
                (true, _) => numbers[at],
                (false, true) => numbers[at] + 1.0,
                (false, false) => 0.0,
            };
            if (0..taken.len()).any(|at| taken[at] != expected(at).to_bits()) {
                return Ok(Err("rows that it takes differ".to_owned()));
            }
        }
        Ok(Ok(()))
    }
}

#[cfg(test)]
mod tests {
    use thunder_collectives::{Op, TransportChoice, local};
    use thunder_compute::{Backend as _, Device as _};

    use super::*;
    use crate::tests::device;
    use crate::{GpuBackend, GpuConfig, Mailboxes, SumForm};

    #[test]
    fn wrong_copies_of_rows_are_refused() {
        let Some(found) = device("wrong_copies_of_rows_are_refused") else { return };
        let wrong: [fn(&Kernel, String) -> String; 4] = [
            |_, text| text.replace("host[there] = x", "host[i] = x"),
            |_, text| text.replace("value = host[there]", "value = host[i]"),
            |_, text| text.replace("var value = 0.0", "var value = 1.0"),
            |_, text| text.replace("x[args.first + i]", "x[i]"),
        ];
        let mut device = Device::open(&found, true).unwrap();
        assert!(HostRows::proved(&mut device).unwrap().is_ok());
        for sabotage in wrong {
            let mut device = Device::open(&found, true).unwrap();
            device.sabotage = Some(sabotage);
            assert!(HostRows::proved(&mut device).unwrap().is_err());
        }
    }

    #[test]
    fn sums_by_the_host_are_those_of_ranks_without_a_device() {
        let Some(found) = device("sums_by_the_host_are_those_of_ranks_without_a_device") else { return };
        const WIDTH: usize = 4090;
        let part = |rank: usize, at: usize| ((at * 7 + rank * 13) % 1021) as f32;
        local::run(2, TransportChoice::Shm, |mut group| {
            let rank = group.rank();
            let values = |rows: usize| (0..rows * WIDTH).map(|at| part(rank, at)).collect::<Vec<_>>();
            // The last but one has more numbers than threads at once.
            let sizes = [2, 55, 300, 30];
            if rank == 1 {
                for mut values in sizes.map(values) {
                    group.all_reduce(&mut values, Op::Sum).unwrap();
                }
                return group.barrier().unwrap();
            }
            let config = GpuConfig { mailboxes: Mailboxes::Never, ..GpuConfig::default() };
            let mut backend = GpuBackend::new(&found, config, group).unwrap();
            assert_eq!(backend.sum_form(), SumForm::Host);
            assert!(backend.sums.host_rows.is_some());
            for rows in sizes {
                let mut x = backend.buffer(rows, WIDTH).unwrap();
                backend.write(&values(rows), &mut x).unwrap();
                backend.all_reduce(&mut x, 0..rows).unwrap();
                let mut found = vec![0.0; rows * WIDTH];
                backend.read(&x, 0..rows, &mut found).unwrap();
                assert_eq!((0..found.len()).find(|at| found[*at] != part(0, *at) + part(1, *at)), None);
            }
            backend.group().barrier().unwrap();
        })
        .unwrap();
    }
}

//! Tables that the kernels of a step read, all in one buffer and uploaded together.

use thunder_compute::ComputeError;

use super::{Device, FIRST_DISPATCHES};
use crate::buffer::Memory;
use crate::follow::Follow;

/// Initial size of a step's tables, in bytes.
const TABLE_BYTES: usize = 1 << 20;

impl Device {
    /// Drops the tables of the previous step. A step of only `generated` rows may be measured.
    pub fn clear_tables(&mut self, generated: Option<usize>) -> Result<(), ComputeError> {
        if self.follow.is_comparing() {
            // The results of the previous step were not read.
            self.interrupt()?;
        }
        if !self.follow.has_given() {
            self.submit()?;
        }
        self.timer.begin_step(&self.device, generated);
        if self.timer.is_on() {
            self.follow = Follow::default();
        }
        let may_repeat = generated.is_some() && !self.timer.is_on();
        self.follow.begin(may_repeat);
        self.ahead.begin(may_repeat && !self.follow.has_given());
        self.most_dispatches = FIRST_DISPATCHES;
        #[cfg(test)]
        {
            self.submissions = 0;
        }
        if let Some((_, used)) = &mut self.tables {
            *used = 0;
        }
        Ok(())
    }

    /// Submits the recorded commands and takes the step's tables, so that another step can have its
    /// own.
    pub fn take_tables(&mut self) -> Result<Option<(Memory, usize)>, ComputeError> {
        self.submit()?;
        Ok(self.tables.take())
    }

    /// Returns what [`Self::take_tables`] took.
    pub fn return_tables(&mut self, tables: Option<(Memory, usize)>) -> Result<(), ComputeError> {
        self.submit()?;
        self.tables = tables;
        Ok(())
    }

    /// Adds a table for kernels of this step. Returns where it is.
    pub fn table(&mut self, words: &[u32]) -> Result<(Memory, u32), ComputeError> {
        if let (Some(first), Some((memory, _))) = (self.follow.table(words), &self.tables) {
            return Ok((memory.clone(), first as u32));
        }
        self.interrupt()?;
        let fits = |tables: &(Memory, usize)| tables.0.bytes() as usize / 4 - tables.1 >= words.len();
        if !self.tables.as_ref().is_some_and(fits) {
            self.upload_tables();
            let bytes = TABLE_BYTES.max(2 * size_of_val(words));
            self.tables = Some((self.memory(bytes, "a step's tables")?, 0));
        }
        let Some((memory, used)) = &mut self.tables else { unreachable!("there are tables now") };
        let (memory, first) = (memory.clone(), *used);
        *used += words.len();
        self.new_tables.extend_from_slice(words);
        self.follow.note_table(words, first);
        Ok((memory, first as u32))
    }

    /// Uploads the new part of the tables in one piece, because each upload costs the host some µs.
    pub(super) fn upload_tables(&mut self) {
        let Some((memory, used)) = self.tables.as_ref().filter(|_| !self.new_tables.is_empty()) else {
            return;
        };
        let first = (used - self.new_tables.len()) as u64 * 4;
        self.queue.write_buffer(&memory.buffer, first, bytemuck::cast_slice(&self.new_tables));
        self.upload_bytes += size_of_val(&*self.new_tables);
        self.new_tables.clear();
    }
}

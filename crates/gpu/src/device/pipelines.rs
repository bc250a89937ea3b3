//! Kernels, compiled by the driver.

use std::time::Instant;

use thunder_compute::ComputeError;
use wgpu::{
    BindGroupLayout, BindGroupLayoutDescriptor, BindGroupLayoutEntry, BindingType, BufferBindingType,
    ComputePipeline, ComputePipelineDescriptor, PassthroughShaderEntryPoint, PipelineCompilationOptions,
    PipelineLayoutDescriptor, ShaderModuleDescriptor, ShaderModuleDescriptorPassthrough, ShaderRuntimeChecks,
    ShaderSource, ShaderStages,
};

use super::{Device, MAX_ARGUMENT_BYTES};
use crate::adapter::block_on;
use crate::kernel::{Access, Kernel, MetalKernel};

pub(super) struct Pipeline {
    pub pipeline: ComputePipeline,
    pub layout: BindGroupLayout,
}

/// A compiled kernel, or why there is none.
pub(super) type Made = Result<Pipeline, String>;

/// What any thread needs to compile a kernel.
pub(super) struct Source {
    device: wgpu::Device,
    kernel: Kernel,
    text: String,
    metal: Option<MetalKernel>,
}

impl Device {
    /// Drops a kernel's pipeline, for a test that replaces its text.
    #[cfg(test)]
    pub fn forget(&mut self, kernel: &Kernel) {
        self.pipelines.remove(kernel);
        self.soon.take(kernel);
        self.bindings.retain(|(bound, _), _| bound != kernel);
    }

    /// Compiles a kernel, if it is not compiled yet.
    pub fn prepare(&mut self, kernel: &Kernel) -> Result<(), ComputeError> {
        if self.pipelines.contains_key(kernel) {
            return Ok(());
        }
        let began = Instant::now();
        let made = self.make(kernel);
        let took = began.elapsed();
        tracing::debug!(?kernel, ?took, "compiled");
        #[cfg(test)]
        {
            self.compiled = (self.compiled.0 + 1, self.compiled.1 + took);
        }
        let made = made.and_then(|pipeline| self.check().map(|()| pipeline).map_err(|e| e.to_string()));
        let failed = |error| self.failed(format!("kernel {kernel:?} does not compile: {error}"));
        let pipeline = made.map_err(failed)?;
        self.pipelines.insert(*kernel, pipeline);
        Ok(())
    }

    /// Lets threads compile kernels that will probably be needed.
    pub fn prepare_soon(&mut self, kernels: impl IntoIterator<Item = Kernel>) {
        for kernel in kernels {
            if !self.pipelines.contains_key(&kernel) && !self.soon.has(&kernel) {
                let source = self.source(&kernel);
                self.soon.add(kernel, source);
            }
        }
    }

    /// Waits for these threads.
    pub fn finish_soon(&self) {
        self.soon.finish();
    }

    /// Compiles kernels that take long, together with the threads. Those that fail to compile stay
    /// missing.
    pub fn prepare_together(&mut self, kernels: &[Kernel]) {
        let missing: Vec<Kernel> =
            kernels.iter().copied().filter(|kernel| !self.pipelines.contains_key(kernel)).collect();
        let began = Instant::now();
        self.prepare_soon(missing.iter().copied());
        // The threads begin with the first ones, so this one begins with the last.
        for kernel in missing.iter().rev() {
            if let Ok(pipeline) = self.make(kernel) {
                self.pipelines.insert(*kernel, pipeline);
            }
        }
        if let [kernel, others @ ..] = &missing[..] {
            tracing::debug!(?kernel, others = others.len(), took = ?began.elapsed(), "compiled together");
        }
    }

    fn make(&self, kernel: &Kernel) -> Made {
        self.soon.take(kernel).unwrap_or_else(|| self.source(kernel).compile())
    }

    fn source(&self, kernel: &Kernel) -> Source {
        let text = kernel.source();
        #[cfg(test)]
        let text = self.sabotage.map_or(text.clone(), |sabotage| sabotage(kernel, text));
        let metal = kernel.metal().filter(|_| self.speaks_metal);
        Source { device: self.device.clone(), kernel: *kernel, text, metal }
    }
}

impl Source {
    pub fn compile(self) -> Made {
        let Self { device, kernel, text, metal } = self;
        let spirv = kernel.spirv(&text).transpose()?;
        let scopes = [wgpu::ErrorFilter::Validation, wgpu::ErrorFilter::Internal]
            .map(|filter| device.push_error_scope(filter));
        let entries: Vec<_> = kernel.bindings().iter().enumerate().map(layout_entry).collect();
        let layout =
            device.create_bind_group_layout(&BindGroupLayoutDescriptor { label: None, entries: &entries });
        let pipeline_layout = device.create_pipeline_layout(&PipelineLayoutDescriptor {
            label: None,
            bind_group_layouts: &[Some(&layout)],
            immediate_size: MAX_ARGUMENT_BYTES,
        });
        let entry = metal.as_ref().map_or("main", |kernel| kernel.name);
        let source = ShaderSource::Wgsl(text.into());
        let description = ShaderModuleDescriptor { label: None, source };
        let passed = |name: &'static str, threads: u32| ShaderModuleDescriptorPassthrough {
            entry_points: vec![PassthroughShaderEntryPoint {
                name: name.into(),
                workgroup_size: (threads, 1, 1),
            }]
            .into(),
            ..Default::default()
        };
        let module = if let Some(MetalKernel { text, name, threads }) = metal {
            let description =
                ShaderModuleDescriptorPassthrough { msl: Some(text.into()), ..passed(name, threads) };
            // SAFETY: its arguments are in buffer 0 and its bindings in those after, as wgpu lays
            // them out. It indexes buffers by what its arguments say, which is within them, and its
            // loops end at numbers from the arguments.
            unsafe { device.create_shader_module_passthrough(description) }
        } else if let Some(words) = spirv {
            // SPIR-V names its threads itself.
            let description =
                ShaderModuleDescriptorPassthrough { spirv: Some(words.into()), ..passed(entry, 0) };
            // SAFETY: the words are naga's, changed as `spirv` says, which moves no access. As in
            // the kernels below, the text keeps each access within its buffer, and loops end at
            // numbers from the arguments.
            unsafe { device.create_shader_module_passthrough(description) }
        } else if kernel.is_unchecked() {
            // SAFETY: in the texts of these kernels, each buffer index is clamped to the size that
            // their arguments give, each index into workgroup memory is below a constant, and each
            // loop ends at a number from the arguments. Checks cost up to 10 %.
            unsafe { device.create_shader_module_trusted(description, ShaderRuntimeChecks::unchecked()) }
        } else {
            device.create_shader_module(description)
        };
        let pipeline = device.create_compute_pipeline(&ComputePipelineDescriptor {
            label: None,
            layout: Some(&pipeline_layout),
            module: &module,
            entry_point: Some(entry),
            // Kernels write workgroup memory before they read it.
            compilation_options: PipelineCompilationOptions {
                zero_initialize_workgroup_memory: false,
                ..Default::default()
            },
            cache: None,
        });
        // The innermost scope first.
        let errors = scopes.into_iter().rev().filter_map(|scope| block_on(scope.pop()));
        match errors.last() {
            Some(error) => Err(error.to_string()),
            None => Ok(Pipeline { pipeline, layout }),
        }
    }
}

fn layout_entry((binding, access): (usize, &Access)) -> BindGroupLayoutEntry {
    BindGroupLayoutEntry {
        binding: binding as u32,
        visibility: ShaderStages::COMPUTE,
        ty: BindingType::Buffer {
            ty: BufferBindingType::Storage { read_only: *access == Access::Read },
            has_dynamic_offset: false,
            min_binding_size: None,
        },
        count: None,
    }
}
